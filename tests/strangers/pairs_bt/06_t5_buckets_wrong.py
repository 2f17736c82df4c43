WHAT = "max_exact is taken from the number of buckets before it is halved for the two directions (line 13), so all buckets of a direction are exact and distances beyond are lumped in the last one: not T5's logarithmic buckets."
"""T5's relative position bias, functional."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


def bucket(relative, num_buckets, max_distance):
    """relative = key - query; half of the buckets for keys that come after."""
    exact = num_buckets // 2  # nearer than that: a bucket each
    num_buckets = num_buckets // 2
    side = (relative > 0).long() * num_buckets
    distance = relative.abs()
    ratio = (distance.clamp(min=1).double() / exact).log() / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).long()
    far = far.clamp(max=num_buckets - 1)
    return side + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    def __init__(self, heads, num_buckets=16, max_distance=40):
        super().__init__()
        self.table = nn.Embedding(num_buckets, heads)
        self.num_buckets, self.max_distance = num_buckets, max_distance

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        query = torch.arange(query_len, device=device)
        key = torch.arange(key_len, device=device)
        which = bucket(key[None, :] - query[:, None], self.num_buckets, self.max_distance)
        return self.table(which).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 40},
)
