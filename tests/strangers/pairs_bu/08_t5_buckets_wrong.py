WHAT = 'T5 buckets: max_exact is half of all buckets, taken before they are shared out to the two directions, so there are no logarithmic buckets at all (line 21)'
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, DISTANCE = 16, 20


class RelativePositionBias(nn.Module):
    def __init__(self, n_heads, num_buckets=BUCKETS, max_distance=DISTANCE):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    def bucket(self, relative_position):
        total = self.num_buckets
        num_buckets = total // 2  # bidirectional
        max_exact = total // 2
        buckets = (relative_position > 0).long() * num_buckets
        n = relative_position.abs()
        ratio = math.log(self.max_distance / max_exact)
        large = max_exact + (
            torch.log(n.clamp(min=1).float() / max_exact) / ratio * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return buckets + torch.where(n < max_exact, n, large)

    def forward(self, query_length, key_length):
        context = torch.arange(query_length)[:, None]
        memory = torch.arange(key_length)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": DISTANCE},
)
