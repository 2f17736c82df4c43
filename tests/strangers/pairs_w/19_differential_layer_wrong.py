WHAT = "The second map's mask is filled out of place and the result dropped, so that what is subtracted attends to padding (line 46)."

"""A layer of the Differential Transformer: the second attention map is taken from the first as common noise."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class HeadRMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * self.gain


class DifferentialAttention(nn.Module):
    def __init__(self, width, heads, depth=1):
        super().__init__()
        self.heads, self.head = heads, width // heads
        self.q, self.k = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.lambdas = nn.Parameter(torch.randn(4, self.head) * 0.1)
        self.norm = HeadRMS(self.head)

    def lam(self):
        a, b, c, d = self.lambdas
        return torch.exp((a * b).sum()) - torch.exp((c * d).sum()) + self.start

    def forward(self, x, attention_mask=None):
        q1, q2 = self.q(x).unflatten(-1, (2, self.heads, self.head)).permute(2, 0, 3, 1, 4)
        k1, k2 = self.k(x).unflatten(-1, (2, self.heads, self.head)).permute(2, 0, 3, 1, 4)
        v = self.v(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        first = q1 @ k1.transpose(-1, -2) * self.head**-0.5
        second = q2 @ k2.transpose(-1, -2) * self.head**-0.5
        if attention_mask is not None:
            hidden, lowest = ~attention_mask[:, None, None, :], torch.finfo(x.dtype).min
            first.masked_fill_(hidden, lowest)
            second.masked_fill(hidden, lowest)
        weights = first.softmax(dim=-1) - self.lam() * second.softmax(dim=-1)
        y = self.norm(weights @ v) * (1 - self.start)
        return self.o(y.transpose(1, 2).flatten(2))


class DifferentialLayer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.norm1, self.norm2 = HeadRMS(width), HeadRMS(width)
        self.attention = DifferentialAttention(width, heads)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, inner), (width, inner), (inner, width)))

    def forward(self, x, attention_mask=None):
        x = x + self.attention(self.norm1(x), attention_mask)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


subject = Subject(
    kind="layer",
    name="differential layer",
    build=lambda c: DifferentialLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
        "stacked": False,
        "structure": "other",
    },
)
