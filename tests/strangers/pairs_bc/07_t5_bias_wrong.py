WHAT = "the logarithmic buckets are scaled by log(max_distance / num_buckets) in place of log(max_distance / max_exact), so that they widen too fast and saturate before max_distance (line 24)."
"""The relative position bias of T5, encoder side: half of the buckets for what comes behind, half for what is ahead."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS = 16
MAX_DISTANCE = 32


def relative_position_bucket(relative_position, num_buckets, max_distance):
    num_buckets //= 2
    bucket = (relative_position > 0).long() * num_buckets
    distance = relative_position.abs()

    # half of what is left: one bucket a distance
    max_exact = num_buckets // 2
    is_small = distance < max_exact

    # the other half: logarithmically wider, up to max_distance
    ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / num_buckets)
    large = max_exact + (ratio * (num_buckets - max_exact)).long()
    large = large.clamp(max=num_buckets - 1)
    return bucket + torch.where(is_small, distance, large)


class T5Bias(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, num_heads)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        bucket = relative_position_bucket(memory - context, NUM_BUCKETS, MAX_DISTANCE)
        return self.relative_attention_bias(bucket).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={
        "positions": "t5",
        "bidirectional": True,
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
    },
)
