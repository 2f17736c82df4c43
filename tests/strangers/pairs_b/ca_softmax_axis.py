"""Cross-attention with einsum."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.axis = c.num_heads, 2 if bad else 3
        self.to_q, self.to_kv = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, 2 * c.d_model)
        self.to_out, self.drop = nn.Linear(c.d_model, c.d_model), nn.Dropout(c.dropout)

    def forward(self, x, memory, memory_mask=None):
        q = self.to_q(x).unflatten(-1, (self.h, -1))
        k, v = (y.unflatten(-1, (self.h, -1)) for y in self.to_kv(memory).chunk(2, -1))
        s = torch.einsum("bihd,bjhd->bhij", q, k) * q.size(-1) ** -0.5
        if memory_mask is not None:
            hidden = ~memory_mask[:, None, None, :]
            w = s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(self.axis).masked_fill(hidden, 0.0)
        else:
            w = s.softmax(self.axis)
        return self.to_out(torch.einsum("bhij,bjhd->bihd", self.drop(w), v).flatten(2))


def subject(bad):
    return Subject(kind="cross_attention", build=lambda c: CrossAttention(c, bad),
                   forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask))


right, wrong = subject(False), subject(True)
WHAT = "The softmax runs over the queries (axis 2) instead of over the keys (axis 3), so that queries influence one another and weights over the memory do not sum to one."
PLACE = "softmax of the attention scores (axis)"
