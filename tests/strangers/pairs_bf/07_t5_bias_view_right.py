"""T5's relative position bias, both directions."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FARTHEST = 16, 32


def bucket_of(relative):
    n = BUCKETS // 2
    offset = (relative > 0).long() * n
    distance = relative.abs()
    exact = n // 2
    log = torch.log(distance.clamp(min=1).double() / exact) / math.log(FARTHEST / exact)
    far = exact + (log * (n - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=n - 1))


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.relative_attention_bias = nn.Embedding(BUCKETS, heads)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        query = torch.arange(query_len, device=device)[:, None]
        key = torch.arange(key_len, device=device)[None, :]
        values = self.relative_attention_bias(bucket_of(key - query))
        return values.permute(2, 0, 1).contiguous()


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FARTHEST},
)
