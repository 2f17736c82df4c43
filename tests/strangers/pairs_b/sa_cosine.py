"""Cosine attention (Swin v2, ViT-22B): unit queries and keys, a fixed scale of 8."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CosineAttention(nn.Module):
    def __init__(self, d, h, p, bad):
        super().__init__()
        self.h, self.drop, self.bad = h, nn.Dropout(p), bad
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)) for f in (self.q, self.k, self.v))
        if self.bad:
            q, k = F.normalize(q), F.normalize(k)
        else:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        s = 8.0 * torch.einsum("bthk,bshk->bhts", q, k)
        if mask is not None:
            hidden = ~mask[:, None, None, :]
            w = s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        else:
            w = s.softmax(-1)
        return self.o(torch.einsum("bhts,bshk->bthk", self.drop(w), v).flatten(2))


def subject(bad):
    return Subject(kind="self_attention", build=lambda c: CosineAttention(c.d_model, c.num_heads, c.dropout, bad),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": False, "query_key_norm": True, "attention_scale": 8.0, "bias": True, "positions": "none"})


right, wrong = subject(False), subject(True)
WHAT = "Queries and keys are normalised along time (F.normalize's default dim=1) instead of along the channels of a head."
PLACE = "query-key normalisation (axis)"
