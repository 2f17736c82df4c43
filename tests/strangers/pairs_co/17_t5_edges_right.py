"""T5's relative bias with its buckets as a table of edges, made once, and looked up without a logarithm."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FURTHEST = 32, 128


def edges(buckets, furthest):
    """The smallest distance of each bucket but the first, one direction."""
    exact = buckets // 2
    distance = torch.arange(furthest + 1)
    far = exact + (
        torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact) * (buckets - exact)
    ).long()
    bucket = torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
    return torch.tensor([int((bucket >= b).nonzero()[0, 0]) for b in range(1, buckets)])


class T5Bias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)
        self.register_buffer("edges", edges(BUCKETS // 2, FURTHEST), persistent=False)

    def forward(self, queries, keys):
        device = self.edges.device
        ahead = torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        bucket = torch.bucketize(ahead.abs(), self.edges, right=True)
        bucket = bucket + (ahead > 0) * (BUCKETS // 2)
        return self.table(bucket).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias by edges",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "num_buckets": BUCKETS, "max_distance": FURTHEST, "bidirectional": True},
)
