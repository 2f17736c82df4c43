"""A pre-LN encoder layer with stochastic depth (Huang et al., 2016), per sample, as in timm."""
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


class DropPath(nn.Module):
    def __init__(self, p, bad):
        super().__init__()
        self.p, self.bad = p, bad

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        keep = 1 - self.p
        kept = (torch.rand(x.size(0), 1, 1, dtype=x.dtype, device=x.device) < keep).to(x.dtype)
        return x * kept if self.bad else x * kept / keep


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.attention, self.ffn = Attention(c.d_model, c.num_heads), FeedForward(c.d_model, c.d_ff)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.path = DropPath(c.dropout, bad)

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        y = self.n1(x)
        x = x + self.path(self.attention(y, y, allowed))
        return x + self.path(self.ffn(self.n2(x)))


def subject(bad):
    return Subject(kind="layer", build=lambda c: Layer(c, bad), forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": False, "drop_path_scaled": True, "norm_placement": "pre", "residual": True, "activation": "gelu"})


right, wrong = subject(False), subject(True)
WHAT = "Stochastic depth does not divide the kept branches by the share that is kept, so that training and evaluation differ in scale."
PLACE = "stochastic depth (drop path) scaling"
