"""T5's relative bias without logarithms at run time: the first distance of each bucket is tabled, and searched."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 32, 128


def first_distances():
    """The least distance of every bucket behind those that hold one distance each."""
    half = BUCKETS // 2
    exact = half // 2
    far = torch.arange(exact, FAR + 1)
    found = exact + (torch.log(far.float() / exact) / math.log(FAR / exact) * (half - exact)).long()
    found = found.clamp(max=half - 1)
    return torch.stack([far[found == b].min() for b in range(exact + 1, half)])


class TabledBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.bias = nn.Embedding(BUCKETS, heads)
        self.register_buffer("edges", first_distances(), persistent=False)

    def bucket(self, gap):
        half = BUCKETS // 2
        exact = half // 2
        far = gap.abs()
        beyond = exact + torch.bucketize(far, self.edges)
        return (gap > 0).long() * half + torch.where(far < exact, far, beyond)

    def forward(self, queries, keys):
        device = self.bias.weight.device
        gap = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
        return self.bias(self.bucket(gap)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="tabled buckets",
    build=lambda c: TabledBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FAR},
)

WHAT = 'bucketize without right=True counts the edges below a distance, not those up to it: a distance that opens a bucket (12, 16, 23, ...) falls into the one before (line 32).'
