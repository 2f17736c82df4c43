"""Decoupled cross-attention, as image prompt adapters have it: a second pair of key and value maps beside the frozen ones."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def attention(q, k, v, hidden=None):
    logits = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    if hidden is None:
        return torch.einsum("bhts,bhse->bhte", logits.softmax(-1), v)
    probs = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(hidden, 0)
    return torch.einsum("bhts,bhse->bhte", probs, v)


class AdaptedCrossAttention(nn.Module):
    def __init__(self, dim, heads, adapter_scale=0.7):
        super().__init__()
        self.heads, self.adapter_scale = heads, adapter_scale
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_k_ip, self.to_v_ip = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, memory, memory_mask=None):
        hidden = None if memory_mask is None else ~memory_mask[:, None, None, :]
        q = self.split(self.to_q(x))
        base = attention(q, self.split(self.to_k(memory)), self.split(self.to_v(memory)), hidden)
        extra = attention(q, self.split(self.to_k_ip(memory)), self.split(self.to_v_ip(memory)))
        out = base + self.adapter_scale * extra
        return self.to_out(out.transpose(1, 2).flatten(2))


subject = Subject(
    kind="cross_attention",
    build=lambda c: AdaptedCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"bias": False},
)

WHAT = "The adapter's own attention is called without the mask of the memory: padded memory tokens reach the output through the second branch (line 34)."
