"""T5's relative position buckets for a decoder: 8 buckets, the last one from distance 20 on."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, heads, bad, buckets=8, farthest=20):
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.buckets, self.farthest, self.bad = buckets, farthest, bad

    def bucket(self, distance):
        exact = self.buckets // 2
        start = self.buckets if self.bad else exact
        ratio = torch.log(distance.clamp(min=1).double() / exact) / math.log(self.farthest / start)
        far = exact + (ratio * (self.buckets - exact)).long()
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def forward(self, queries, keys):
        t = torch.arange(queries, device=self.table.weight.device)[:, None]
        s = torch.arange(keys, device=self.table.weight.device)[None, :]
        return self.table(self.bucket((t - s).clamp(min=0))).permute(2, 0, 1)


def subject(bad):
    return Subject(kind="position_bias", build=lambda c: RelativeBias(c.num_heads, bad), forward=lambda m, t, s: m(t, s),
                   declares={"positions": "t5", "bidirectional": False, "num_buckets": 8, "max_distance": 20})


right, wrong = subject(False), subject(True)
WHAT = "The logarithmic buckets divide by log(max_distance / num_buckets) instead of log(max_distance / max_exact), so that they saturate long before the distance of 20."
PLACE = "logarithmic relative position buckets"
