WHAT = "stochastic depth divides by the share kept in training and multiplies by it at evaluation too (both conventions at once), so in eval mode both branches are too small by 1 - drop_path (line 20)."
"""Pre-norm encoder layer with stochastic depth on both branches, timm style."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.keep = 1.0 - rate

    def forward(self, branch):
        if self.keep == 1.0:
            return branch
        if not self.training:
            return branch * self.keep
        gate = branch.new_empty(branch.shape[0], *[1] * (branch.dim() - 1)).bernoulli_(self.keep)
        return branch * gate.div_(self.keep)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop_path=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)

    def forward(self, x, attention_mask=None):
        x = x + self.drop_path1(self.attn(self.norm1(x), attention_mask))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


subject = Subject(
    kind="layer",
    name="layer with drop path",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, drop_path=c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "positions": "none",
        "drop_path_scaled": True,
    },
)
