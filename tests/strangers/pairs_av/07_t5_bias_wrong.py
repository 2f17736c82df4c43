WHAT = "max_exact is taken from all buckets before they are halved for the two directions: the exact range is twice as wide and the logarithmic buckets are gone (line 22)"
"""T5 relative position bias of an encoder."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativePositionBias(nn.Module):
    def __init__(self, n_heads, num_buckets=8, max_distance=16, bidirectional=True):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    @staticmethod
    def _bucket(relative_position, bidirectional, num_buckets, max_distance):
        buckets = torch.zeros_like(relative_position)
        max_exact = num_buckets // 2
        if bidirectional:
            num_buckets //= 2
            buckets = buckets + (relative_position > 0).long() * num_buckets
            n = relative_position.abs()
        else:
            n = (-relative_position).clamp(min=0)
        is_small = n < max_exact
        large = max_exact + (
            torch.log(n.float().clamp(min=1) / max_exact)
            / math.log(max_distance / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return buckets + torch.where(is_small, n, large)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_len, device=device)[:, None]
        memory = torch.arange(key_len, device=device)[None, :]
        bucket = self._bucket(memory - context, self.bidirectional, self.num_buckets, self.max_distance)
        return self.relative_attention_bias(bucket).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 16},
)
