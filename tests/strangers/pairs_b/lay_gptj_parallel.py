"""GPT-J's block: attention and feed-forward read the same norm and are added to the residual stream together."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def attend(q, k, v, allowed=None, drop=None):
    """q [B, H, T, K]; allowed is boolean and broadcasts to [B, H, T, S]; a row that may see nothing gives zeros."""
    s = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
    w = s.softmax(-1)
    if allowed is not None:
        w = w.masked_fill(~allowed, 0.0)
    if drop is not None:
        w = drop(w)
    return w @ v


class Attention(nn.Module):
    def __init__(self, d, h, p=0.0):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.drop = nn.Dropout(p)

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, memory, allowed=None):
        y = attend(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)), allowed, self.drop)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d, hidden, p=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(x))))


class ParallelBlock(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.d_model)
        self.attn, self.mlp = Attention(c.d_model, c.num_heads, c.dropout), FeedForward(c.d_model, c.d_ff, c.dropout)
        self.bad = bad

    def forward(self, x, attention_mask=None):
        t = x.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        residual = x
        x = self.ln_1(x)
        if self.bad:
            residual = x
        return residual + self.attn(x, x, allowed) + self.mlp(x)


def subject(bad):
    return Subject(kind="layer", build=lambda c: ParallelBlock(c, bad), forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "gelu",
                             "structure": "other"})


right, wrong = subject(False), subject(True)
WHAT = "The residual connection adds the normalised input instead of the input of the block."
PLACE = "residual connection of the parallel block"
