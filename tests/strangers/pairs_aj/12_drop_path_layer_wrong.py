WHAT = 'Stochastic depth draws one number a token rather than one a sample: single tokens lose the branch, not whole samples; line 22: `shape = x.shape[:-1] + (1,)`.'
"""A pre-LN encoder layer with stochastic depth, in the manner of timm."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DropPath(nn.Module):
    """Drops the residual branch of a sample, at the given rate."""

    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        shape = x.shape[:-1] + (1,)
        return x * x.new_empty(shape).bernoulli_(keep) / keep


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * (C // self.num_heads) ** -0.5) @ k.transpose(-2, -1)
        if mask is not None:
            attn = attn.masked_fill(~mask[:, None, None, :], torch.finfo(attn.dtype).min)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop_path):
        super().__init__()
        self.norm1, self.attn, self.drop_path1 = nn.LayerNorm(dim), Attention(dim, num_heads), DropPath(drop_path)
        self.norm2, self.mlp, self.drop_path2 = nn.LayerNorm(dim), Mlp(dim, hidden), DropPath(drop_path)

    def forward(self, x, mask=None):
        x = x + self.drop_path1(self.attn(self.norm1(x), mask))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


subject = Subject(
    kind="layer",
    name="layer with stochastic depth",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "bias": True,
        "drop_path_scaled": True,
    },
)
