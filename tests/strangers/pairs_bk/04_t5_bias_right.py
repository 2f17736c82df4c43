import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=8, max_distance=20):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        num_buckets = self.num_buckets
        num_buckets //= 2
        max_exact = num_buckets // 2
        side = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
        ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact)
        far = max_exact + (ratio * (num_buckets - max_exact)).long()
        far = far.clamp(max=num_buckets - 1)
        return side + torch.where(distance < max_exact, distance, far)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 20},
)
