"""T5's relative position bias of a decoder: 32 buckets, half of them exact, the rest logarithmic up to 128."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def t5_bias(difference):
    class RelativePositionBias(nn.Module):
        def __init__(self, heads, num_buckets=32, max_distance=128):
            super().__init__()
            self.num_buckets, self.max_distance = num_buckets, max_distance
            self.relative_attention_bias = nn.Embedding(num_buckets, heads)

        def _relative_position_bucket(self, relative_position):
            n = torch.clamp(-relative_position, min=0)
            max_exact = self.num_buckets // 2
            large = max_exact + (
                torch.log(n.clamp(min=1).double() / max_exact)
                / math.log(self.max_distance / max_exact)
                * (self.num_buckets - max_exact)
            ).long()
            large = large.clamp(max=self.num_buckets - 1)
            return torch.where(n < max_exact, n, large)

        def forward(self, qlen, klen):
            device = self.relative_attention_bias.weight.device
            context_position = torch.arange(qlen, device=device)[:, None]
            memory_position = torch.arange(klen, device=device)[None, :]
            buckets = self._relative_position_bucket(difference(context_position, memory_position))
            return self.relative_attention_bias(buckets).permute(2, 0, 1)

    return RelativePositionBias


def subject(cls):
    return Subject(
        kind="position_bias",
        name="t5 bias",
        build=lambda c: cls(c.num_heads),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        declares={"positions": "t5", "bidirectional": False, "num_buckets": 32, "max_distance": 128},
    )


right = subject(t5_bias(lambda context, memory: memory - context))
wrong = subject(t5_bias(lambda context, memory: context - memory))
WHAT = "relative position is query - key instead of key - query: the one-sided buckets put the whole past into bucket 0"
CAUSE = (
    "The sign of the relative position is turned round, so in the unidirectional scheme every past key falls into bucket 0 "
    "and only future keys (which a decoder hides) are told apart by distance."
)
