WHAT = "natural logarithm over a logarithm to base 2: far buckets grow too slowly and the last ones are never reached at max_distance (line 25)"
"""T5's relative position bias, bidirectional."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 16, 32


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(BUCKETS, heads)

    @staticmethod
    def bucket(relative):
        """`relative` is the key's position less the query's."""
        side = BUCKETS // 2
        out = (relative > 0).long() * side
        n = relative.abs()
        exact = side // 2
        coarse = torch.log(n.clamp(min=1).float() / exact) / math.log2(FAR / exact) * (side - exact)
        coarse = (exact + coarse.long()).clamp(max=side - 1)
        return out + torch.where(n < exact, n, coarse)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        relative = torch.arange(key_len, device=device)[None] - torch.arange(query_len, device=device)[:, None]
        return self.relative_attention_bias(self.bucket(relative)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FAR},
)
