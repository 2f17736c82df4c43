WHAT = "T5 buckets: the logarithmic half is scaled by log(max_distance / num_buckets) rather than by log(max_distance / max_exact), so that far buckets are reached too early."
"""Relative position bias of T5's encoder."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5Bias(nn.Module):
    def __init__(self, num_heads, num_buckets=16, max_distance=40):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        num_buckets = self.num_buckets // 2
        relative_buckets = (relative_position > 0).long() * num_buckets
        relative_position = relative_position.abs()
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        ratio = torch.log(relative_position.clamp(min=1).double() / max_exact)
        ratio = ratio / math.log(self.max_distance / num_buckets)
        large = max_exact + (ratio * (num_buckets - max_exact)).to(torch.long)
        large = torch.min(large, torch.full_like(large, num_buckets - 1))
        return relative_buckets + torch.where(is_small, relative_position, large)

    def forward(self, query_length, key_length):
        context = torch.arange(query_length)[:, None]
        memory = torch.arange(key_length)[None, :]
        return self.relative_attention_bias(self.bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 40},
)
