import math

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_model // num_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wkv = nn.Linear(d_model, 2 * d_model)
        self.wo = nn.Linear(d_model, d_model)

    def split(self, x):
        B, N, _ = x.shape
        return x.view(B, N, self.num_heads, self.d_head).transpose(1, 2)

    def keys_values(self, memory):
        k, v = self.wkv(memory).chunk(2, dim=-1)
        return self.split(k), self.split(v)

    def forward(self, x, memory, memory_mask=None):
        q = self.split(self.wq(x))
        k, v = self.keys_values(memory)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(self.d_head)
        if memory_mask is not None:
            scores = scores.masked_fill(memory_mask.logical_not()[:, None, None], float("-inf"))
        out = torch.einsum("bhts,bhsd->bthd", torch.softmax(scores, dim=-1), v)
        return self.wo(out.flatten(2))


subject = Subject(
    kind="cross_attention",
    name="cross-attention of a captioner",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": True},
)
