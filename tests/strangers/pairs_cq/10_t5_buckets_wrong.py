"""T5's relative attention bias, ported from Mesh TensorFlow."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def relative_position_bucket(relative_position, bidirectional=True, num_buckets=32, max_distance=128):
    ret = torch.zeros_like(relative_position)
    n = -relative_position
    max_exact = num_buckets // 2
    if bidirectional:
        num_buckets //= 2
        ret = ret + (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    is_small = n < max_exact
    ratio = torch.log(n.clamp(min=1).to(torch.float64) / max_exact) / math.log(max_distance / max_exact)
    val_if_large = max_exact + (ratio * (num_buckets - max_exact) + 1e-9).long()
    val_if_large = val_if_large.clamp(max=num_buckets - 1)
    return ret + torch.where(is_small, n, val_if_large)


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(32, heads)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        context = torch.arange(query_len, device=device)[:, None]
        memory = torch.arange(key_len, device=device)[None, :]
        return self.table(relative_position_bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)

WHAT = 'Line 14: Max_exact is taken before the buckets are halved between the two directions: 16 of 16 buckets a side are exact, none is left for the logarithm, and distances saturate at 15 rather than at 128.'
