"""T5's relative position bias of the encoder, ported from the Flax module."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativePositionBiases(nn.Module):
    def __init__(self, num_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.rel_embedding = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        half = self.num_buckets // 2
        ret = (relative_position > 0).long() * half
        n = relative_position.abs()
        max_exact = half // 2
        is_small = n < max_exact
        log_ratio = torch.log(n.clamp(min=1).float() / max_exact) / math.log(self.max_distance / max_exact)
        val_if_large = max_exact + (log_ratio * (half - max_exact)).round().long()
        val_if_large = val_if_large.clamp(max=half - 1)
        return ret + torch.where(is_small, n, val_if_large)

    def forward(self, qlen, klen):
        device = self.rel_embedding.weight.device
        context = torch.arange(qlen, device=device)[:, None]
        memory = torch.arange(klen, device=device)[None, :]
        return self.rel_embedding(self.bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 from flax",
    build=lambda c: RelativePositionBiases(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)

WHAT = (
    'astype(int32) truncates; the port rounds to the nearest bucket, so that the borders of the logarithmic buckets lie half a bucket too near'
    ' (line 23).'
)
