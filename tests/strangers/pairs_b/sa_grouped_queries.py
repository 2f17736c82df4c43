"""Grouped-query attention (Ainslie et al., 2023): four query heads share two key-value heads, neighbours sharing one."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class GroupedQueryAttention(nn.Module):
    def __init__(self, d, h, g, bad):
        super().__init__()
        self.h, self.g, self.bad = h, g, bad
        k = d // h
        self.wq, self.wo = nn.Linear(d, h * k, bias=False), nn.Linear(h * k, d, bias=False)
        self.wk, self.wv = nn.Linear(d, g * k, bias=False), nn.Linear(d, g * k, bias=False)

    def attend(self, x, mask):
        q = self.wq(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k = self.wk(x).unflatten(-1, (self.g, -1)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (self.g, -1)).transpose(1, 2)
        n = self.h // self.g
        k = k.repeat_interleave(n, 1)
        v = v.repeat(1, n, 1, 1) if self.bad else v.repeat_interleave(n, 1)
        s = q @ k.transpose(2, 3) * q.size(-1) ** -0.5
        if mask is None:
            return s.softmax(-1), v
        hidden = ~mask[:, None, None, :]
        return s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hidden, 0.0), v

    def forward(self, x, mask=None):
        w, v = self.attend(x, mask)
        return self.wo((w @ v).transpose(1, 2).flatten(2))


def subject(bad):
    return Subject(kind="self_attention",
                   build=lambda c: GroupedQueryAttention(c.d_model, c.num_heads, c.num_key_value_heads, bad),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   weights=lambda m, x, attention_mask=None: m.attend(x, attention_mask)[0],
                   projections=lambda m: {"q": m.wq.weight, "k": m.wk.weight, "v": m.wv.weight, "o": m.wo.weight},
                   domain={"d_model": [16, 32], "num_heads": [4], "num_key_value_heads": [2]},
                   declares={"causal": False, "grouped_queries": True, "bias": False, "positions": "none"})


right, wrong = subject(False), subject(True)
WHAT = "The value heads are tiled (0, 1, 0, 1) where the key heads are repeated (0, 0, 1, 1): query heads 1 and 2 pair the keys of one group with the values of the other."
PLACE = "expansion of the key-value heads (values)"
