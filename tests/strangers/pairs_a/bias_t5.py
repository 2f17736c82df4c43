import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The distance is taken as query minus key where the unidirectional bucketing expects key minus query, '
    'so all past keys fall into bucket 0 and distances are told apart only for (masked) future keys.'
)
PLACE = 'sign of the distance in the T5 relative position buckets'


class T5Bias(nn.Module):
    """Unidirectional: keys of the past are told apart, all others share bucket 0."""

    buckets, furthest = 8, 16

    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(self.buckets, heads)

    def bucket(self, relative):
        """relative: key position minus query position."""
        behind = -relative.clamp(max=0)
        exact = self.buckets // 2
        far = torch.log(behind.clamp(min=1).double() / exact) / math.log(self.furthest / exact)
        far = (exact + far * (self.buckets - exact)).long().clamp(max=self.buckets - 1)
        return torch.where(behind < exact, behind, far)

    def forward(self, query_len, key_len):
        queries = torch.arange(query_len, device=self.table.weight.device)[:, None]
        keys = torch.arange(key_len, device=self.table.weight.device)[None, :]
        return self.table(self.bucket(keys - queries)).permute(2, 0, 1)


class T5Bias2(nn.Module):
    """Unidirectional: keys of the past are told apart, all others share bucket 0."""

    buckets, furthest = 8, 16

    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(self.buckets, heads)

    def bucket(self, relative):
        """relative: key position minus query position."""
        behind = -relative.clamp(max=0)
        exact = self.buckets // 2
        far = torch.log(behind.clamp(min=1).double() / exact) / math.log(self.furthest / exact)
        far = (exact + far * (self.buckets - exact)).long().clamp(max=self.buckets - 1)
        return torch.where(behind < exact, behind, far)

    def forward(self, query_len, key_len):
        queries = torch.arange(query_len, device=self.table.weight.device)[:, None]
        keys = torch.arange(key_len, device=self.table.weight.device)[None, :]
        return self.table(self.bucket(queries - keys)).permute(2, 0, 1)


right = Subject(
    kind="position_bias",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": False, "num_buckets": 8, "max_distance": 16},
)

wrong = Subject(
    kind="position_bias",
    build=lambda c: T5Bias2(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": False, "num_buckets": 8, "max_distance": 16},
)
