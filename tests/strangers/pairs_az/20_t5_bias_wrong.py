WHAT = "the buckets are clamped to the whole number, not each direction to its half: keys far in the past fall in the buckets of the future (line 27)."
"""T5's relative attention bias, both ways: half of the buckets for the past, half for the future."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 8, 10


class RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=BUCKETS, max_distance=FAR):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative_position):
        half = self.num_buckets // 2
        offset = (relative_position > 0).long() * half
        distance = relative_position.abs()
        max_exact = half // 2
        log_ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact)
        large = max_exact + (log_ratio * (half - max_exact)).long()
        return (torch.where(distance < max_exact, distance, large) + offset).clamp(max=self.num_buckets - 1)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_length, device=device)[:, None]
        memory = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FAR},
)
