"""A pre-norm encoder layer (ViT, GPT-2 order)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Heads(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, keep=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if keep is None else keep[:, None, None, :]
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Base(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(d), Heads(d, h)
        self.norm2, self.mlp = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))


def first():
    class Layer(Base):
        def forward(self, x, keep=None):
            x = x + self.attn(self.norm1(x), keep)
            x = x + self.mlp(self.norm2(x))
            return x

    return Layer


def second():
    class Layer(Base):
        def forward(self, x, keep=None):
            x = self.norm1(x)
            x = x + self.attn(x, keep)
            x = self.norm2(x)
            x = x + self.mlp(x)
            return x

    return Layer


def subject(cls):
    return Subject(
        kind="layer",
        name="pre-norm layer",
        build=lambda c: cls(c.d_model, c.num_heads, c.d_ff),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={
            "causal": False,
            "positions": "none",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu",
            "stacked": False,
        },
    )


right = subject(first())
wrong = subject(second())
WHAT = "x = norm(x); x = x + f(x): the residual starts behind the norm, the stream is normalised twice a layer"
CAUSE = (
    "The residual connection carries the normalised input instead of the input: the norm stands on the residual stream "
    "itself, so there is no identity path through the layer."
)
