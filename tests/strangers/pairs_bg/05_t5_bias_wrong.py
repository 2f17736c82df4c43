WHAT = "max_exact (line 14) is taken from num_buckets before the halving for the two directions: 16 exact buckets a side leave none for the logarithm, and the bias saturates at distance 15 rather than 128."
"""T5's relative attention bias for an encoder, from mesh-tensorflow."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def bucket_of(relative_position, bidirectional=True, num_buckets=32, max_distance=128):
    # half of the buckets are for exact increments in positions
    max_exact = num_buckets // 2
    ret = torch.zeros_like(relative_position)
    n = -relative_position
    if bidirectional:
        num_buckets //= 2
        ret = ret + (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    is_small = n < max_exact
    log_ratio = torch.log(n.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    val_if_large = max_exact + (log_ratio * (num_buckets - max_exact)).long()
    val_if_large = val_if_large.clamp(max=num_buckets - 1)
    return ret + torch.where(is_small, n, val_if_large)


class RelativeAttentionBias(nn.Module):
    def __init__(self, heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Embedding(num_buckets, heads)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        context = torch.arange(query_len, device=device)[:, None]
        memory = torch.arange(key_len, device=device)[None, :]
        buckets = bucket_of(memory - context, True, self.num_buckets, self.max_distance)
        return self.table(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 encoder bias",
    build=lambda c: RelativeAttentionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
