WHAT = "the logarithmic bins are spread over self.num_buckets, not over the half that is left of them when the bias is bidirectional: distances saturate long before max_distance (line 34)"
"""The relative position bias of T5's encoder, a port of the Mesh TensorFlow function."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    def __init__(self, n_heads, num_buckets=8, max_distance=16, bidirectional=True):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    def _relative_position_bucket(self, relative_position):
        num_buckets = self.num_buckets
        relative_buckets = torch.zeros_like(relative_position)
        if self.bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).long() * num_buckets
            relative_position = relative_position.abs()
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))

        # half of the buckets are for exact increments in positions
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        # the other half are for logarithmically bigger bins, up to max_distance
        share = torch.log(relative_position.clamp(min=1).float() / max_exact) / math.log(self.max_distance / max_exact)
        if_large = max_exact + (share * (self.num_buckets - max_exact)).long()
        if_large = if_large.clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(is_small, relative_position, if_large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        buckets = self._relative_position_bucket(memory_position - context_position)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 16},
)
