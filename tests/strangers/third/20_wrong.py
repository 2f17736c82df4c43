import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiQueryAttention(nn.Module):
    """Shazeer 2019: many query heads, one shared key/value head."""

    def __init__(self, d_model: int = 64, n_heads: int = 8, attn_pdrop: float = 0.0):
        super().__init__()
        self.d_model = d_model
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.softmax_scale = self.head_dim ** -0.5
        self.attn_pdrop = attn_pdrop
        self.Wqkv = nn.Linear(d_model, d_model + 2 * self.head_dim, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, attn_bias=None):
        b, s, _ = x.shape
        query, key, value = self.Wqkv(x).split([self.d_model, self.head_dim, self.head_dim], dim=2)
        query = query.view(b, s, self.n_heads, self.head_dim).transpose(1, 2) * self.softmax_scale
        key = key.unsqueeze(1).expand(b, self.n_heads, s, self.head_dim)
        value = value.unsqueeze(1).expand(b, self.n_heads, s, self.head_dim)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_bias,
            dropout_p=self.attn_pdrop if self.training else 0.0,
            is_causal=attn_bias is None,
        )
        return self.out_proj(out.transpose(1, 2).reshape(b, s, self.d_model))


attn = MultiQueryAttention(d_model=64, n_heads=8)
