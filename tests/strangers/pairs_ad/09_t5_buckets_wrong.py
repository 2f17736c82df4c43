WHAT = "the logarithmic buckets divide by log(max_distance / num_buckets) rather than log(max_distance / max_exact) (line 25): they saturate at half of max_distance"
"""T5's relative position bias for encoders."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5Bias(nn.Module):
    def __init__(self, n_heads, num_buckets=16, max_distance=32):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    @staticmethod
    def bucket(relative_position, num_buckets, max_distance):
        """Half of the buckets for keys ahead; of each half the first half exact, the others logarithmic."""
        num_buckets //= 2
        ahead = (relative_position > 0).long() * num_buckets
        n = relative_position.abs()
        max_exact = num_buckets // 2
        far = torch.log(n.clamp(min=1).double() / max_exact) / math.log(max_distance / num_buckets)
        far = max_exact + (far * (num_buckets - max_exact)).long()
        far = far.clamp(max=num_buckets - 1)
        return ahead + torch.where(n < max_exact, n, far)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_len, device=device)[:, None]
        memory = torch.arange(key_len, device=device)[None, :]
        buckets = self.bucket(memory - context, self.num_buckets, self.max_distance)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5Bias",
    build=lambda c: T5Bias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 32},
)
