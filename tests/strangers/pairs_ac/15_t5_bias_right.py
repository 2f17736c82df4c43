"""The relative bias of an UMT5/T5 encoder, as a function over a table."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def bucket_of(offset: int, num_buckets: int, max_distance: int) -> int:
    """offset = key position - query position; half of the buckets for what comes behind."""
    half = num_buckets // 2
    start = half if offset > 0 else 0
    distance = abs(offset)
    exact = half // 2
    if distance < exact:
        return start + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return start + min(exact + int(share * (half - exact)), half - 1)


class RelativeBias(nn.Module):
    def __init__(self, heads: int, num_buckets: int = 8, max_distance: int = 20):
        super().__init__()
        self.table = nn.Parameter(torch.randn(num_buckets, heads))
        self.num_buckets, self.max_distance = num_buckets, max_distance

    def forward(self, query_len: int, key_len: int) -> torch.Tensor:
        rows = [
            [bucket_of(s - t, self.num_buckets, self.max_distance) for s in range(key_len)] for t in range(query_len)
        ]
        index = torch.tensor(rows, dtype=torch.long, device=self.table.device)
        return self.table[index].permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 20},
)
