"""T5's buckets from a list of integer thresholds instead of a logarithm, 8 buckets to distance 20, both directions. Unusual:
torch.bucketize and no log; right, a bucket's first distance is the least integer that the formula puts there."""
import math
import torch
from torch import nn
from veriformer.properties import Subject
NB, MD = 8, 20


class T5Bias(nn.Module):
    def __init__(s, H):
        super().__init__()
        n = NB // 2
        e = n // 2
        edges = list(range(1, e)) + [math.ceil(e * (MD / e) ** (b / (n - e)) - 1e-9) for b in range(n - e)]
        s.edges, s.table = edges, nn.Parameter(torch.randn(NB, H))

    def forward(s, T, S):
        dev = s.table.device
        rel = torch.arange(S, device=dev)[None] - torch.arange(T, device=dev)[:, None]
        bucket = torch.bucketize(rel.abs(), torch.tensor(s.edges, device=dev), right=True) + (rel > 0) * (NB // 2)
        return s.table[bucket].permute(2, 0, 1)


args = dict(kind="position_bias", build=lambda c: T5Bias(c.num_heads), forward=lambda m, query_len, key_len: m(query_len, key_len))
undeclared = Subject(**args)
declared = Subject(**args, declares={"positions": "t5", "num_buckets": NB, "max_distance": MD, "bidirectional": True})
