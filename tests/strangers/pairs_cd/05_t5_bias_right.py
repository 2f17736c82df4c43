"""Relative position bias of T5's encoder."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=8, max_distance=16):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative):
        per_side = self.num_buckets // 2
        result = (relative > 0).long() * per_side
        distance = relative.abs()
        max_exact = per_side // 2
        far = max_exact + (
            torch.log(distance.clamp(min=1).float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (per_side - max_exact)
        ).long()
        far = far.clamp(max=per_side - 1)
        return result + torch.where(distance < max_exact, distance, far)

    def forward(self, T, S):
        device = self.table.weight.device
        relative = torch.arange(S, device=device)[None, :] - torch.arange(T, device=device)[:, None]
        return self.table(self.bucket(relative)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 8, "max_distance": 16},
)
