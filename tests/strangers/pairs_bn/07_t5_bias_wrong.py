WHAT = 'the logarithm of the buckets is taken to the base max_distance / num_buckets instead of max_distance / max_exact: large distances fall into too high buckets and saturate at 16 instead of near 32 (line 25)'
"""Relative position bias of T5's encoder, ported."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=16, max_distance=32):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def _relative_position_bucket(self, relative_position):
        num_buckets = self.num_buckets // 2
        relative_buckets = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
        max_exact = num_buckets // 2
        is_small = distance < max_exact
        log_ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(self.max_distance / num_buckets)
        if_large = max_exact + (log_ratio * (num_buckets - max_exact)).long()
        if_large = if_large.clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(is_small, distance, if_large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        buckets = self._relative_position_bucket(memory - context)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 32},
)
