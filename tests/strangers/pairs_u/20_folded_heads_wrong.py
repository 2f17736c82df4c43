WHAT = "the memory's mask is repeated for the heads as a block, but heads are folded into the batch sample by sample: with more than one sample heads get another sample's mask (line 42)"
# Cross-attention to a memory with the heads folded into the batch, as bmm wants them; a gate on what it gives.
import math

import torch
from torch import nn, bmm

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    """Queries from x [B, T, D], keys and values from memory [B, S, D]; softmax over S."""

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, key_value_heads
        self.head_width = width // heads
        self.to_queries = nn.Linear(width, width)
        self.to_keys = nn.Linear(width, key_value_heads * self.head_width)
        self.to_values = nn.Linear(width, key_value_heads * self.head_width)
        self.to_output = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.ones(width))

    def fold(self, x, heads):
        """[B, T, h * K] -> [B * H, T, K]"""
        batch, length = x.shape[:2]
        x = x.view(batch, length, heads, self.head_width).transpose(1, 2)
        if heads < self.heads:
            x = x.repeat_interleave(self.heads // heads, dim=1)
        return x.reshape(batch * self.heads, length, self.head_width)

    def unfold(self, x, batch):
        return x.view(batch, self.heads, -1, self.head_width).transpose(1, 2).flatten(2)

    def forward(self, x, memory, memory_mask=None):
        batch = x.shape[0]
        queries = self.fold(self.to_queries(x), self.heads)
        keys = self.fold(self.to_keys(memory), self.groups)
        values = self.fold(self.to_values(memory), self.groups)
        scores = bmm(queries, keys.transpose(1, 2)) / math.sqrt(self.head_width)
        if memory_mask is not None:
            hidden = ~memory_mask.repeat(self.heads, 1)
            scores = scores.masked_fill(hidden[:, None, :], -math.inf)
        attended = self.unfold(bmm(scores.softmax(dim=-1), values), batch)
        return self.to_output(attended) * self.gate


def build(c):
    return CrossAttention(c.d_model, c.num_heads, c.num_key_value_heads)


def forward(model, x, memory, memory_mask=None):
    return model(x, memory, memory_mask)


subject = Subject(kind="cross_attention", name="folded cross-attention", build=build, forward=forward)
