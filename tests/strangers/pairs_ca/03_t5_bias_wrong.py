WHAT = 'The logarithmic buckets are spread over `num_buckets` instead of the `num_buckets - max_exact` that remain, so that distances saturate far before max_distance.'
import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def _bucket(self, relative_position):
        num_buckets = self.num_buckets // 2
        buckets = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
        max_exact = num_buckets // 2
        is_small = distance < max_exact
        large = max_exact + (
            torch.log(distance.clamp(min=1).float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * num_buckets
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return buckets + torch.where(is_small, distance, large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self._bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
