"""The relative position bias of a T5 encoder."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativePositionBias(nn.Module):
    def __init__(self, n_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    def bucket(self, relative_position):
        """relative_position: key minus query. Half of the buckets is for keys behind the query, half for those ahead."""
        per_side = self.num_buckets // 2
        side = (relative_position > 0).long() * per_side
        distance = relative_position.abs()
        # near: one bucket a distance; far: logarithmically wider ones up to max_distance
        max_exact = per_side // 2
        ratio = distance.clamp(min=1).float() / max_exact
        far = max_exact + (
            torch.log(ratio) / math.log(self.max_distance / max_exact) * (per_side - max_exact)
        ).long()
        far = far.clamp(max=per_side - 1)
        return side + torch.where(distance < max_exact, distance, far)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory_position - context_position))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
