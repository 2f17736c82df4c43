"""T5's relative position bias, bidirectional."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The logarithm of far distances is divided by log(max_distance / num_buckets) instead of log(max_distance / max_exact)."
CAUSE = (
    "Far distances are put into the wrong buckets: the logarithmic half is scaled by log(max_distance / num_buckets), not "
    "log(max_distance / max_exact), so buckets grow too fast and saturate before max_distance."
)
BUCKETS, FAR = 32, 128


def make(denominator):
    class T5RelativeBias(nn.Module):
        def __init__(self, num_heads):
            super().__init__()
            self.relative_attention_bias = nn.Embedding(BUCKETS, num_heads)

        @staticmethod
        def bucket(relative_position):
            num_buckets = BUCKETS // 2
            ahead = (relative_position > 0).long() * num_buckets
            distance = relative_position.abs()
            max_exact = num_buckets // 2
            ratio = torch.log(distance.clamp(min=1).float() / max_exact) / denominator(max_exact, num_buckets)
            far = max_exact + (ratio * (num_buckets - max_exact)).long()
            far = far.clamp(max=num_buckets - 1)
            return ahead + torch.where(distance < max_exact, distance, far)

        def forward(self, query_length, key_length):
            device = self.relative_attention_bias.weight.device
            context = torch.arange(query_length, device=device)[:, None]
            memory = torch.arange(key_length, device=device)[None, :]
            values = self.relative_attention_bias(self.bucket(memory - context))
            return values.permute(2, 0, 1)

    return T5RelativeBias


def subject(denominator):
    bias = make(denominator)
    return Subject(
        kind="position_bias",
        name="T5 bias",
        build=lambda c: bias(c.num_heads),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FAR},
    )


right = subject(lambda max_exact, num_buckets: math.log(FAR / max_exact))
wrong = subject(lambda max_exact, num_buckets: math.log(FAR / num_buckets))
