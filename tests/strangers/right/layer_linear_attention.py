"""Encoder layer with linear attention (elu + 1 feature map), LayerScale and stochastic depth; pre-norm.

Unusual: there is no softmax; weights are phi(q) phi(k) over their sum, so a row still sums to one and none is negative, but
nothing of size T x T is made. Each branch is multiplied by a learned vector (LayerScale) and may be dropped for a sample.
A sample of nothing but padding mixes to zero.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class LinearAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)

    @staticmethod
    def phi(x):
        return F.elu(x) + 1

    def forward(self, x, mask=None):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)) for w in (self.to_q, self.to_k, self.to_v))
        q, k = self.phi(q), self.phi(k)
        if mask is not None:
            k = k * mask[:, :, None, None]
        state = torch.einsum("bthd,bthe->bhde", k, v)
        weight = torch.einsum("bthd,bhd->bth", q, k.sum(dim=1)).unsqueeze(-1)
        mixed = torch.einsum("bthd,bhde->bthe", q, state)
        empty = weight == 0
        mixed = torch.where(empty, torch.zeros_like(mixed), mixed / torch.where(empty, torch.ones_like(weight), weight))
        return self.to_out(mixed.flatten(2))


class LayerScale(nn.Module):
    def __init__(self, dim, init=0.1):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x):
        return x.mul(self.gamma)


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        kept = x.new_empty(x.size(0), *[1] * (x.dim() - 1)).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p) if self.p < 1 else x * kept


class LinearBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.d_model, eps=1e-6)
        self.attn = LinearAttention(c.d_model, c.num_heads)
        self.ls1, self.ls2 = LayerScale(c.d_model), LayerScale(c.d_model)
        self.drop_path = DropPath(c.dropout)
        self.norm2 = nn.LayerNorm(c.d_model, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, attention_mask=None):
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), attention_mask)))
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return x


COMMON = dict(
    kind="layer",
    build=LinearBlock,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "positions": "none",
        "padding_side": "both",
        "memory": "linear",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "drop_path_scaled": True,
        "structure": "other",
    },
)
