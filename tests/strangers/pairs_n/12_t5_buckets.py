"""The relative bias of T5's encoder, written after the paper and the Mesh TensorFlow code."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The number of exact buckets is taken from all buckets, before half of them are set aside for the other direction."
CAUSE = (
    "max_exact = num_buckets // 2 stands in front of the bidirectional halving of num_buckets, so a direction gives "
    "all of its buckets to single distances and none to logarithmic ranges: 4, 5 and 6 steps no longer share a bucket, "
    "and everything from 7 steps on falls into the last one."
)


def bucket(relative, bidirectional, num_buckets, max_distance):
    """relative: key position minus query position."""
    offset = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        offset = (relative > 0).long() * num_buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    max_exact = num_buckets // 2
    far = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    far = max_exact + (far * (num_buckets - max_exact)).long()
    return offset + torch.where(distance < max_exact, distance, far.clamp(max=num_buckets - 1))


def bucket_exact_first(relative, bidirectional, num_buckets, max_distance):
    """relative: key position minus query position."""
    offset = torch.zeros_like(relative)
    max_exact = num_buckets // 2
    if bidirectional:
        num_buckets //= 2
        offset = (relative > 0).long() * num_buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    far = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    far = max_exact + (far * (num_buckets - max_exact)).long()
    return offset + torch.where(distance < max_exact, distance, far.clamp(max=num_buckets - 1))


class RelativePositionBias(nn.Module):
    def __init__(self, heads, rule, bidirectional=True, num_buckets=16, max_distance=32):
        super().__init__()
        self.rule, self.options = rule, (bidirectional, num_buckets, max_distance)
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        keys = torch.arange(key_len, device=device)[None, :]
        queries = torch.arange(query_len, device=device)[:, None]
        buckets = self.rule(keys - queries, *self.options)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


def subject(rule):
    return Subject(
        kind="position_bias",
        name=f"T5 bias, {rule.__name__}",
        build=lambda c: RelativePositionBias(c.num_heads, rule),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 32},
    )


right = subject(bucket)
wrong = subject(bucket_exact_first)
