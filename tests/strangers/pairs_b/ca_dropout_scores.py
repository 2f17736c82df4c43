"""Cross-attention with dropout, from a reading of the paper."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.bad = c.num_heads, bad
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, memory, memory_mask=None):
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in (self.q(x), self.k(memory), self.v(memory)))
        s = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if memory_mask is not None:
            s = s.masked_fill(~memory_mask[:, None, None, :], torch.finfo(s.dtype).min / 8)
        w = self.drop(s).softmax(-1) if self.bad else self.drop(s.softmax(-1))
        if memory_mask is not None:
            w = w * memory_mask.any(-1)[:, None, None, None]
        return self.o((w @ v).transpose(1, 2).flatten(2))


def subject(bad):
    return Subject(kind="cross_attention", build=lambda c: CrossAttention(c, bad),
                   forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask))


right, wrong = subject(False), subject(True)
WHAT = "Dropout is applied to the scores before the softmax instead of to the weights after it: in training a dropped masked score becomes 0, so that padded memory is seen, and no weight is ever dropped."
PLACE = "dropout of the cross-attention"
