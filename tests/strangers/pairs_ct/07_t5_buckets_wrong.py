"""T5 relative position buckets for a speech encoder."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 32, 128


def bucket(relative, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
    half = num_buckets // 2
    side = (relative > 0).long() * half
    n = relative.abs()
    max_exact = num_buckets // 2
    small = n < max_exact
    log_ratio = torch.log(n.clamp(min=1).float() / max_exact) / math.log(max_distance / max_exact)
    large = max_exact + (log_ratio * (half - max_exact)).long()
    large = large.clamp(max=half - 1)
    return side + torch.where(small, n, large)


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(NUM_BUCKETS, heads)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        q = torch.arange(query_len, device=device)[:, None]
        k = torch.arange(key_len, device=device)[None, :]
        return self.table(bucket(k - q)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE, "bidirectional": True},
)

WHAT = 'The number of exact buckets is taken from all buckets, not from those of one direction (line 16): there are no logarithmic ones left, and the bias saturates at a distance of 15 instead of 128.'
