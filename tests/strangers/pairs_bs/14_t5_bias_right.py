"""Relative position bias of T5, for an encoder."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 16


class T5RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        half = self.num_buckets // 2
        side = (relative_position > 0).long() * half
        distance = relative_position.abs()

        max_exact = half // 2
        ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact)
        far = max_exact + (ratio * (half - max_exact)).long()
        far = far.clamp(max=half - 1)
        return side + torch.where(distance < max_exact, distance, far)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        query = torch.arange(query_len, device=device)[:, None]
        key = torch.arange(key_len, device=device)[None, :]
        return self.relative_attention_bias(self.bucket(key - query)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={
        "positions": "t5",
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
        "bidirectional": True,
    },
)
