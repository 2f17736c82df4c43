import math

import torch
from torch import nn

from veriformer.properties import Subject


class RelativePositionBias(nn.Module):
    def __init__(self, heads, num_buckets=16, max_distance=40):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def _bucket(self, rel):
        # rel = key position - query position; half of the buckets for keys behind the query, half for those after it
        n = self.num_buckets // 2
        ret = (rel > 0).long() * n
        rel = rel.abs()
        max_exact = n // 2
        large = max_exact + (
            torch.log(rel.clamp(min=1).float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (n - max_exact)
        ).long()
        large = large.clamp(max=n - 1)
        return ret + torch.where(rel < max_exact, rel, large)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        q = torch.arange(query_len, device=device)[:, None]
        k = torch.arange(key_len, device=device)[None, :]
        return self.relative_attention_bias(self._bucket(k - q)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "num_buckets": 16, "max_distance": 40, "bidirectional": True},
)
