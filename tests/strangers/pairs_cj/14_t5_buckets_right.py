"""T5's relative position bias for an encoder, ported from mesh-tensorflow."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Embedding(num_buckets, heads)

    def bucket(self, relative):
        """relative = key - query."""
        half = self.num_buckets // 2
        side = (relative > 0).long() * half
        distance = relative.abs()
        max_exact = half // 2
        far = (
            torch.log(distance.clamp(min=1).float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (half - max_exact)
        )
        far = (max_exact + far.long()).clamp(max=half - 1)
        return side + torch.where(distance < max_exact, distance, far)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        query, key = torch.arange(query_len, device=device), torch.arange(key_len, device=device)
        return self.table(self.bucket(key[None, :] - query[:, None])).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
