WHAT = 'The logarithmic buckets are spread over all buckets rather than those of one direction, so that far distances saturate much too early (at about 7 in place of 20); line 32: `* (self.num_buckets - max_exact)`.'
"""T5's relative position bias for an encoder (both directions), in the manner of transformers."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS = 16
MAX_DISTANCE = 20


class RelativePositionBias(nn.Module):
    def __init__(self, num_heads, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def _bucket(self, relative_position):
        per_side = self.num_buckets // 2
        side = (relative_position > 0).long() * per_side
        distance = relative_position.abs()

        max_exact = per_side // 2
        is_small = distance < max_exact
        large = max_exact + (
            torch.log(distance.float().clamp_min(1) / max_exact)
            / math.log(self.max_distance / max_exact)
            * (self.num_buckets - max_exact)
        ).long()
        large = large.clamp(max=per_side - 1)
        return side + torch.where(is_small, distance, large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self._bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={
        "positions": "t5",
        "bidirectional": True,
        "num_buckets": NUM_BUCKETS,
        "max_distance": MAX_DISTANCE,
    },
)
