# T5's relative position bias of the encoder (bidirectional), from the Mesh TensorFlow code.
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativePositionBias(nn.Module):
    def __init__(self, num_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    @staticmethod
    def bucket(relative_position, num_buckets, max_distance):
        half = num_buckets // 2
        max_exact = half // 2
        side = (relative_position > 0).long() * half
        distance = relative_position.abs()
        large = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
        large = max_exact + (large * (half - max_exact)).long()
        large = large.clamp(max=half - 1)
        return side + torch.where(distance < max_exact, distance, large)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        query = torch.arange(query_len, device=device)[:, None]
        key = torch.arange(key_len, device=device)[None, :]
        buckets = self.bucket(key - query, self.num_buckets, self.max_distance)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
