import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    """T5's bucketed bias, used over the frames of a spectrogram (both directions)."""

    def __init__(self, heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.table = nn.Embedding(num_buckets, heads)

    def bucket(self, relative):
        per_side = self.num_buckets // 2
        offset = (relative > 0).long() * per_side
        distance = relative.abs()
        max_exact = per_side // 2
        ratio = torch.log(distance.clamp(min=1).float() / max_exact) / math.log(self.max_distance / max_exact)
        far = max_exact + (ratio * (per_side - max_exact)).long()
        far = far.clamp(max=per_side - 1)
        return offset + torch.where(distance < max_exact, distance, far).clamp(max=per_side - 1)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        relative = torch.arange(key_len, device=device)[None, :] - torch.arange(query_len, device=device)[:, None]
        return self.table(self.bucket(relative)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="frame bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
