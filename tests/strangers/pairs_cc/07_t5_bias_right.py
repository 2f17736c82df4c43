import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    def __init__(self, heads, num_buckets=12, max_distance=20):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def bucket(self, relative_position):
        num_buckets = self.num_buckets // 2
        buckets = (relative_position > 0).long() * num_buckets
        relative_position = torch.abs(relative_position)
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        ratio = torch.log(relative_position.clamp(min=1).float() / max_exact) / math.log(self.max_distance / max_exact)
        large = max_exact + (ratio * (num_buckets - max_exact)).long()
        large = torch.clamp(large, max=num_buckets - 1)
        return buckets + torch.where(is_small, relative_position, large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        return self.relative_attention_bias(self.bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 12, "max_distance": 20},
)
