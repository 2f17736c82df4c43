"""A ModernBERT encoder: rotary positions, GeGLU, no biases, pre-norm with a first layer that has none."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


def rotate(x, base):
    T, dim = x.shape[-2:]
    inv = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angle = torch.arange(T, dtype=torch.float64, device=x.device)[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: DrawnConfig, base):
        super().__init__()
        self.num_heads, self.head_dim, self.base = c.num_heads, c.d_model // c.num_heads, base
        if self.head_dim % 2:
            raise ValueError("rotary positions need an even head_dim")
        self.Wqkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.Wo = nn.Linear(c.d_model, c.d_model, bias=False)
        self.dropout = c.dropout
        self.out_drop = nn.Dropout(c.dropout)

    def forward(self, x, mask):
        B, T, D = x.shape
        qkv = self.Wqkv(x).view(B, T, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, self.base), rotate(k, self.base)
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
        return self.out_drop(self.Wo(y.transpose(1, 2).reshape(B, T, D)))


class MLP(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.Wi = nn.Linear(c.d_model, 2 * c.d_ff, bias=False)
        self.Wo = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x):
        value, gate = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(self.drop(F.gelu(value) * gate))


class Layer(nn.Module):
    def __init__(self, c: DrawnConfig, index, base):
        super().__init__()
        self.attn_norm = nn.Identity() if index == 0 else nn.LayerNorm(c.d_model, bias=False)
        self.mlp_norm = nn.LayerNorm(c.d_model, bias=False)
        self.attn, self.mlp = Attention(c, base), MLP(c)

    def forward(self, x, mask):
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class ModernBert(nn.Module):
    def __init__(self, c: DrawnConfig, base=160000.0):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.norm = nn.LayerNorm(c.d_model, bias=False)
        self.drop = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList([Layer(c, i, base) for i in range(c.num_layers)])
        self.final_norm = nn.LayerNorm(c.d_model, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.drop(self.norm(self.tok_embeddings(tokens)))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_norm(x)


subject = Subject(
    kind="encoder",
    name="modernbert",
    build=ModernBert,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "positions": "rotary", "base": 160000.0},
)
