"""T5's relative position bias, for an encoder."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, heads, buckets=32, far=128):
        super().__init__()
        self.buckets, self.far = buckets, far
        self.table = nn.Embedding(buckets, heads)

    def bucket_of(self, offset):
        """The bucket of key position - query position; the upper half of the buckets is for keys that come later."""
        side = self.buckets // 2
        exact = side // 2
        later = (offset > 0).long() * side
        distance = offset.abs()
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.far / exact)
        rough = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
        return later + torch.where(distance < exact, distance, rough)

    def forward(self, n_queries, n_keys):
        device = self.table.weight.device
        offset = torch.arange(n_keys, device=device)[None, :] - torch.arange(n_queries, device=device)[:, None]
        return self.table(self.bucket_of(offset)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias of an encoder",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
