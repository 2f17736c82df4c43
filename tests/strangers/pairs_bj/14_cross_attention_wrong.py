WHAT = "The memory mask is tiled with repeat (head-major) while batch and heads are folded batch-major (line 31), so with more than one sample and head, heads are masked by the mask of another sample."
"""Encoder-decoder attention with heads folded into the batch, for bmm."""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def fold(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.h, d // self.h).permute(0, 2, 1, 3).reshape(b * self.h, n, d // self.h)

    def unfold(self, t):
        bh, n, d = t.shape
        return t.view(bh // self.h, self.h, n, d).permute(0, 2, 1, 3).reshape(bh // self.h, n, self.h * d)

    def forward(self, x, memory, memory_mask=None):
        q = self.fold(self.to_q(x))
        k, v = (self.fold(t) for t in self.to_kv(memory).chunk(2, dim=-1))
        sim = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
        if memory_mask is not None:
            keep = memory_mask.repeat(self.h, 1).unsqueeze(1)
            sim = sim.masked_fill(~keep, torch.finfo(sim.dtype).min)
        return self.to_out(self.unfold(torch.bmm(sim.softmax(dim=-1), v)))


subject = Subject(
    kind="cross_attention",
    name="cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": True, "empty_row": "mean"},
)
