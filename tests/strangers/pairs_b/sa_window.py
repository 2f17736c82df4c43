"""Mistral's sliding window: every position sees itself and the two before it."""
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


class WindowAttention(nn.Module):
    def __init__(self, c, bad, window=3):
        super().__init__()
        self.inner = Attention(c.d_model, c.num_heads, c.dropout)
        self.diagonal = -window if bad else 1 - window

    def forward(self, x, mask=None):
        t = x.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril().triu(self.diagonal)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        return self.inner(x, x, allowed)


def subject(bad):
    return Subject(kind="self_attention", build=lambda c: WindowAttention(c, bad),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "window": 3, "positions": "none"})


right, wrong = subject(False), subject(True)
WHAT = "The sliding window is one key too long: position t sees t-3 to t, four keys, where a window of 3 is declared."
PLACE = "sliding-window mask"
