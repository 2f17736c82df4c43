"""T5's relative attention bias of the encoder (Raffel et al. 2020), as a table looked up by bucket."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 32, 128


def logarithmic(distance, max_exact, num_buckets):
    """The buckets from max_exact on: equal steps of log distance, the last for all that is farther."""
    share = torch.log(distance.float().clamp(min=1) / max_exact) / math.log(MAX_DISTANCE / max_exact)
    large = max_exact + (share * (num_buckets - max_exact)).long()
    return large.clamp(max=num_buckets - 1)


def bucket_right(relative_position):
    num_buckets = NUM_BUCKETS // 2
    max_exact = num_buckets // 2
    bucket = (relative_position > 0).long() * num_buckets
    distance = relative_position.abs()
    return bucket + torch.where(distance < max_exact, distance, logarithmic(distance, max_exact, num_buckets))


def bucket_wrong(relative_position):
    max_exact = NUM_BUCKETS // 2
    num_buckets = NUM_BUCKETS // 2
    bucket = (relative_position > 0).long() * num_buckets
    distance = relative_position.abs()
    return bucket + torch.where(distance < max_exact, distance, logarithmic(distance, max_exact, num_buckets))


class T5RelativeBias(nn.Module):
    def __init__(self, n_heads, bucket):
        super().__init__()
        self.bucket = bucket
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, n_heads)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory_position - context_position))
        return values.permute(2, 0, 1)


def subject(bucket):
    return Subject(
        kind="position_bias",
        name="T5 bias",
        build=lambda c: T5RelativeBias(c.num_heads, bucket),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares={
            "positions": "t5",
            "bidirectional": True,
            "num_buckets": NUM_BUCKETS,
            "max_distance": MAX_DISTANCE,
        },
    )


right, wrong = subject(bucket_right), subject(bucket_wrong)
WHAT = "The number of exact buckets is half of all 32 buckets instead of half of the 16 that one direction has."
CAUSE = (
    "max_exact is taken before num_buckets is halved for the two directions: distances up to 15 get buckets of their own and all that is "
    "farther falls into the last, so there are no logarithmic buckets; 8, 9, 10, 11 should share one, 16 and 100 should not."
)
