"""The bucketed bias of T5's encoder."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    def __init__(self, n_heads, num_buckets=16, max_distance=32, bidirectional=True):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    def _relative_position_bucket(self, relative_position):
        num_buckets = self.num_buckets
        relative_buckets = torch.zeros_like(relative_position)
        if self.bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).long() * num_buckets
            relative_position = relative_position.abs()
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        ratio = relative_position.clamp(min=1).double() / max_exact
        large = max_exact + (
            ratio.log() / math.log(self.max_distance / max_exact) * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        relative_buckets += torch.where(is_small, relative_position, large)
        return relative_buckets

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        buckets = self._relative_position_bucket(memory - context)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "num_buckets": 16, "max_distance": 32, "bidirectional": True},
)
