"""Cross-attention with the keys transposed on the way in."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "the scale is read off the transposed keys: 1/sqrt(number of keys) instead of 1/sqrt(d_head)"
CAUSE = "Scores are divided by the square root of the number of keys (the length of the memory) instead of sqrt(d_head)."


class CrossAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def scale(self, q, k):
        return 1 / math.sqrt(q.size(-1))

    def forward(self, x, xa, mask=None):
        q, k, v = self.query(x), self.key(xa), self.value(xa)
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1)
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k * self.scale(q, k)
        if mask is not None:
            qk = qk.masked_fill(~mask[:, None, None, :], torch.finfo(qk.dtype).min)
        wv = (qk.softmax(dim=-1) @ v).permute(0, 2, 1, 3).flatten(start_dim=2)
        return self.out(wv)


class MemoryAttention(CrossAttention):
    def scale(self, q, k):
        return 1 / math.sqrt(k.size(-1))


def subject(model):
    return Subject(
        kind="cross_attention",
        name="cross-attention",
        build=lambda c: model(c.d_model, c.num_heads),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    )


right = subject(CrossAttention)
wrong = subject(MemoryAttention)
