"""T5's relative position bias; one function for encoders (both directions) and decoders (the past alone)."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def relative_position_bucket(relative, bidirectional, num_buckets, max_distance):
    buckets = torch.zeros_like(relative)
    max_exact = num_buckets // 2
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (relative > 0).long() * num_buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    growth = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    far = max_exact + (growth * (num_buckets - max_exact) + 1e-9).long()
    far = far.clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < max_exact, distance.clamp(max=num_buckets - 1), far)


class T5Bias(nn.Module):
    def __init__(self, heads, bidirectional=True, num_buckets=32, max_distance=128):
        super().__init__()
        self.bidirectional, self.num_buckets, self.max_distance = bidirectional, num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        relative = torch.arange(key_length, device=device)[None] - torch.arange(query_length, device=device)[:, None]
        buckets = relative_position_bucket(relative, self.bidirectional, self.num_buckets, self.max_distance)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda m, query_length, key_length: m(query_length, key_length),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)

WHAT = (
    'max_exact is computed before the buckets are halved for the two directions (line 12), so the logarithmic buckets have no room left and all distances from 15 on share one bucket.'
)
