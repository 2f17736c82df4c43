WHAT = "the relative position is query - key where the bucketing expects key - query, so that every key of the past falls into bucket 0 and only the future is told apart (line 30)."
import math

import torch
from torch import nn

from veriformer.properties import Subject


class DecoderRelativeBias(nn.Module):
    """T5's bias of a decoder: the distance to the past in buckets, one scalar a bucket and head."""

    def __init__(self, num_heads, num_buckets=8, max_distance=20):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        distance = (-relative_position).clamp(min=0)
        exact = self.num_buckets // 2
        scaled = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        large = exact + (scaled * (self.num_buckets - exact)).long()
        return torch.where(distance < exact, distance, large.clamp(max=self.num_buckets - 1))

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        query = torch.arange(query_len, device=device)[:, None]
        key = torch.arange(key_len, device=device)[None, :]
        return self.table(self.bucket(query - key)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 decoder bias",
    build=lambda c: DecoderRelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": False, "num_buckets": 8, "max_distance": 20},
)
