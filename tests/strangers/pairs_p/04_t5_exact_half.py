"""T5's relative position bias, ported line by line from mesh-tensorflow."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 32, 128


def bucket_right(relative_position, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    """relative_position = key - query; buckets of the future are the upper half."""
    num_buckets //= 2
    offset = (relative_position > 0).long() * num_buckets
    n = relative_position.abs()
    max_exact = num_buckets // 2
    ratio = (n.clamp(min=1).double() / max_exact).log() / math.log(max_distance / max_exact)
    large = max_exact + (ratio * (num_buckets - max_exact)).long()
    large = large.clamp(max=num_buckets - 1)
    return offset + torch.where(n < max_exact, n, large)


def bucket_wrong(relative_position, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    """relative_position = key - query; buckets of the future are the upper half."""
    max_exact = num_buckets // 2
    num_buckets //= 2
    offset = (relative_position > 0).long() * num_buckets
    n = relative_position.abs()
    ratio = (n.clamp(min=1).double() / max_exact).log() / math.log(max_distance / max_exact)
    large = max_exact + (ratio * (num_buckets - max_exact)).long()
    large = large.clamp(max=num_buckets - 1)
    return offset + torch.where(n < max_exact, n, large)


class RelativePositionBias(nn.Module):
    def __init__(self, num_heads, bucket):
        super().__init__()
        self.bucket = bucket
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, num_heads)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_len, device=device)[:, None]
        memory = torch.arange(key_len, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute(2, 0, 1)


def subject(name, bucket):
    return Subject(
        kind="position_bias",
        name=name,
        build=lambda c: RelativePositionBias(c.num_heads, bucket),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares={"positions": "t5", "bidirectional": True, "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE},
    )


right = subject("t5 bias", bucket_right)
wrong = subject("t5 bias, hoisted", bucket_wrong)

WHAT = "max_exact is computed before the number of buckets is halved for the two directions."
CAUSE = (
    "With 16 buckets a side the exact ones should be 8; here max_exact is 16, so distances up to 15 have buckets of their own and "
    "everything further is clamped into the last one: no logarithmic buckets are left."
)
