"""The relative position bias of T5's encoder."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 16, 40


class T5RelativePositionBias(nn.Module):
    def __init__(self, num_heads, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    @staticmethod
    def _relative_position_bucket(relative_position, num_buckets, max_distance):
        # bidirectional: one half of the buckets for keys ahead, one for keys behind
        num_buckets //= 2
        max_exact = num_buckets // 2
        relative_buckets = (relative_position > 0).long() * num_buckets
        relative_position = relative_position.abs()
        is_small = relative_position < max_exact
        ratio = torch.log(relative_position.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
        relative_position_if_large = max_exact + (ratio * (num_buckets - max_exact)).long()
        relative_position_if_large = relative_position_if_large.clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(is_small, relative_position, relative_position_if_large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        buckets = self._relative_position_bucket(
            memory_position - context_position, self.num_buckets, self.max_distance
        )
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={
        "positions": "t5",
        "bidirectional": True,
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
    },
)
