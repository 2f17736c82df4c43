"""T5's relative position bias, bidirectional, as an encoder has it."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 16, 24


class RelativePositionBias(nn.Module):
    def __init__(self, num_heads, num_buckets=BUCKETS, max_distance=FAR, bidirectional=True):
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative):
        num_buckets = self.num_buckets
        buckets = torch.zeros_like(relative)
        if self.bidirectional:
            num_buckets //= 2
            buckets = buckets + (relative > 0).long() * num_buckets
            distance = relative.abs()
        else:
            distance = -torch.clamp(relative, max=0)
        max_exact = num_buckets // 2
        large = max_exact + (
            torch.log(distance.float().clamp(min=1) / max_exact)
            / math.log(self.max_distance / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return buckets + torch.where(distance < max_exact, distance, large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "num_buckets": BUCKETS, "max_distance": FAR, "bidirectional": True},
)
