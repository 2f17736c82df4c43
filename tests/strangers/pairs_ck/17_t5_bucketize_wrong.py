"""T5's relative bias; the logarithms are taken once, when the model is built: a call is a torch.bucketize."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 16, 24


def edges(buckets, far):
    """The smallest distance of each bucket but the first."""
    exact = buckets // 2
    n = torch.arange(1, far + 1)
    large = exact + (torch.log(n.float() / exact) / math.log(far / exact) * (buckets - exact)).long()
    bucket = torch.where(n < exact, n, large.clamp(max=buckets - 1))
    return torch.tensor([int(n[bucket >= b][0]) for b in range(1, buckets)])


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)
        self.register_buffer("edges", edges(BUCKETS // 2, FAR), persistent=False)

    def forward(self, queries, keys):
        device = self.edges.device
        relative = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
        bucket = torch.bucketize(relative.abs(), self.edges, right=False)
        bucket = bucket + (relative > 0) * (BUCKETS // 2)
        return self.table(bucket).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "num_buckets": BUCKETS, "max_distance": FAR, "bidirectional": True,
              "equal_lengths": True},
)

WHAT = 'Line 30: right=False: a distance that is the edge of a bucket falls into the bucket below, so that distance 1 shares the bucket of 0 and the rest is shifted by one.'
