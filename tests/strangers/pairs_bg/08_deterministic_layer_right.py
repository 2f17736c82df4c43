"""A post-norm encoder layer after the flax example for WMT, with its `deterministic` flag."""

import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads, mlp_dim, dropout_rate):
        super().__init__()
        self.heads, self.rate = heads, dropout_rate
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.wi = nn.Linear(dim, mlp_dim)
        self.wo = nn.Linear(mlp_dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    @property
    def deterministic(self):
        return not self.training

    def dropout(self, h):
        return F.dropout(h, self.rate, training=not self.deterministic)

    def attention(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        bias = None if mask is None else mask[:, None, None, :].expand(B, 1, T, T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x, mask=None):
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        h = self.dropout(F.relu(self.wi(x)))
        return self.norm2(x + self.dropout(self.wo(h)))


subject = Subject(
    kind="layer",
    name="flax-like encoder block",
    build=lambda c: EncoderBlock(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "bias": True,
    },
)
