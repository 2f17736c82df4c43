"""T5 relative position bias, bucket by bucket, from the Mesh TensorFlow code."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 16, 32


def bucket(relative_position, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    num_buckets //= 2
    ret = (relative_position > 0).long() * num_buckets
    n = relative_position.abs()
    max_exact = num_buckets // 2
    ratio = n.clamp(min=max_exact).double() / max_exact
    val_if_large = max_exact + (
        torch.log(ratio) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    ).long()
    val_if_large = val_if_large.clamp(max=num_buckets - 1)
    return ret + torch.where(n < max_exact, n, val_if_large)


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Parameter(torch.randn(NUM_BUCKETS, heads))

    def forward(self, qlen, klen):
        dev = self.table.device
        memory, context = torch.arange(klen, device=dev)[None, :], torch.arange(qlen, device=dev)[:, None]
        return self.table[bucket(memory - context)].permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE},
)
