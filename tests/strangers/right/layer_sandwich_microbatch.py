"""Causal layer with sandwich norms (before and behind each sublayer) and GeGLU, computed in micro-batches of two samples.

Unusual: the batch is cut into pieces of at most two samples that go through one after the other; samples never meet, so the
pieces cannot matter. Inside, sums are in place on tensors the layer has made itself; the caller's x is left alone.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

MICRO = 2


class SandwichLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.h = c.num_heads
        self.p = c.dropout
        self.pre_attn, self.post_attn = nn.LayerNorm(d), nn.LayerNorm(d)
        self.pre_mlp, self.post_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.Wq, self.Wk, self.Wv, self.Wo = (nn.Linear(d, d) for _ in range(4))
        self.W_gate, self.W_up = nn.Linear(d, c.d_ff), nn.Linear(d, c.d_ff)
        self.W_down = nn.Linear(c.d_ff, d)

    def attention(self, x, mask):
        n, t, d = x.shape
        q = self.Wq(x).view(n, t, self.h, -1)
        k = self.Wk(x).view(n, t, self.h, -1)
        v = self.Wv(x).view(n, t, self.h, -1)
        s = torch.einsum("nihd,njhd->nhij", q, k).div_((d // self.h) ** 0.5)
        dead = torch.ones(t, t, dtype=torch.bool, device=x.device).triu_(1)[None, None]
        if mask is not None:
            dead = dead | mask.logical_not()[:, None, None, :]
        s.masked_fill_(dead, torch.finfo(s.dtype).min)
        w = s.softmax(-1).masked_fill(dead, 0)
        w = F.dropout(w, self.p, self.training)
        return self.Wo(torch.einsum("nhij,njhd->nihd", w, v).reshape(n, t, d))

    def piece(self, x, mask):
        y = self.post_attn(self.attention(self.pre_attn(x), mask))
        y = F.dropout(y, self.p, self.training)
        y = y.add(x)
        z = self.pre_mlp(y)
        z = self.W_down(F.gelu(self.W_gate(z)).mul(self.W_up(z)))
        z = F.dropout(self.post_mlp(z), self.p, self.training)
        return z.add_(y)

    def forward(self, x, attention_mask=None):
        outputs = []
        for start in range(0, x.size(0), MICRO):
            mask = None if attention_mask is None else attention_mask[start : start + MICRO]
            outputs.append(self.piece(x[start : start + MICRO], mask))
        return torch.cat(outputs) if outputs else x


COMMON = dict(
    kind="layer",
    build=SandwichLayer,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "none",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "other",
        "residual": True,
        "activation": "other",
        "bias": True,
        "structure": "other",
    },
)
