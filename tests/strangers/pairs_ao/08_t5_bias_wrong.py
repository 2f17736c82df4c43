WHAT = "the number of exact buckets is half of all buckets rather than half of one side's, so all distances get buckets of their own up to saturation at 7 and no bucket is logarithmic (line 20)."
"""Bidirectional T5 bias; the buckets of a length are computed once, as one vector of distances."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS = 16
MAX_DISTANCE = 50


def buckets(relative, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    """relative = key - query. Half of the buckets are the future's; of a half, half are exact and half logarithmic."""
    per_side = num_buckets // 2
    side = (relative > 0).long() * per_side
    distance = relative.abs()
    exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (per_side - exact)).long()).clamp(max=per_side - 1)
    return side + torch.where(distance < exact, distance, far)


class T5Bias(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.table = nn.Embedding(NUM_BUCKETS, num_heads)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        line = self.table(buckets(torch.arange(1 - query_len, key_len, device=device)))  # one row a distance
        query, key = torch.arange(query_len, device=device), torch.arange(key_len, device=device)
        return line[key[None, :] - query[:, None] + query_len - 1].permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE},
)
