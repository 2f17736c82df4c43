"""T5's relative position bias of an encoder, buckets on both sides."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative):
        """relative = key position - query position."""
        num_buckets = self.num_buckets
        num_buckets //= 2
        max_exact = num_buckets // 2
        offset = (relative > 0).long() * num_buckets
        distance = relative.abs()
        ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact)
        large = max_exact + (ratio * (num_buckets - max_exact)).long()
        large = large.clamp(max=num_buckets - 1)
        return offset + torch.where(distance < max_exact, distance, large)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        queries = torch.arange(query_len, device=device)[:, None]
        keys = torch.arange(key_len, device=device)[None, :]
        return self.table(self.bucket(keys - queries)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
