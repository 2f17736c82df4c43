WHAT = "the logarithmic T5 buckets are divided by log(max_distance) and not by log(max_distance / max_exact), so distances share too few buckets and the last bucket is not reached at max_distance (line 22: torch.log(dist.clamp(min=1).float() / max_exact) / math.log(self.max_distance) * (n - max_exact))"
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, heads, num_buckets=16, max_distance=32):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def bucket(self, relative_position):
        n = self.num_buckets // 2
        ret = (relative_position > 0).long() * n
        dist = relative_position.abs()
        max_exact = n // 2
        large = max_exact + (
            torch.log(dist.clamp(min=1).float() / max_exact) / math.log(self.max_distance) * (n - max_exact)
        ).long()
        return ret + torch.where(dist < max_exact, dist, large.clamp(max=n - 1))

    def forward(self, query_len, key_len):
        context = torch.arange(key_len - query_len, key_len)[:, None]
        memory = torch.arange(key_len)[None, :]
        return self.relative_attention_bias(self.bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 32},
)
