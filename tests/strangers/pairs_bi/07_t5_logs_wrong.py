WHAT = 'The logarithm of the distance is to base 2, that of the range it is divided by to base e: the logarithmic buckets are passed through 1.44 times too fast and saturate at a distance near 54, not 128 (line 21: log2 / math.log).'
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def bucket(self, relative_position):
        half = self.num_buckets // 2
        side = (relative_position > 0).long() * half
        n = relative_position.abs()
        max_exact = half // 2
        ratio = torch.log2(n.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact)
        large = max_exact + (ratio * (half - max_exact)).long()
        large = large.clamp(max=half - 1)
        return side + torch.where(n < max_exact, n, large)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(query_len, device=device)[:, None]
        memory = torch.arange(key_len, device=device)[None, :]
        return self.relative_attention_bias(self.bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5's relative bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
