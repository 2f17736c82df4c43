import math

import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    """T5's buckets of a decoder: 0 for the future, then exact distances, then logarithmic ones."""
    buckets, longest = 8, 16

    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.table = nn.Embedding(self.buckets, c.num_heads)

    def forward(self, query_len, key_len):
        dev = self.table.weight.device
        relative = torch.arange(key_len, device=dev)[None] - torch.arange(query_len, device=dev)[:, None]
        back = relative.clamp(min=0) if self.bug else (-relative).clamp(min=0)
        exact = self.buckets // 2
        far = exact + (torch.log(back.clamp(min=1).double() / exact) / math.log(self.longest / exact) * (self.buckets - exact) + 1e-9).long()
        bucket = torch.where(back < exact, back, far.clamp(max=self.buckets - 1))
        return self.table(bucket).permute(2, 0, 1)


WHAT = 'The sign of the distance is not turned for the one-sided case, so the whole past falls into bucket 0 and only the future is told apart.'
PLACE = 'T5 bucket computation, one-sided'


def make(bug):
    return Subject(
        kind="position_bias",
        build=lambda c: Net(c, bug),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares={'positions': 't5', 'bidirectional': False, 'num_buckets': 8, 'max_distance': 16},
    )


right, wrong = make(False), make(True)
