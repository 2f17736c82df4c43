WHAT = "the number of exact buckets is taken before the buckets are halved for the two directions, so that no bucket is left for distances from 16 to 128 (line 28)"

"""T5's relative position bias: a table of buckets by heads."""

import torch
from torch import nn

from veriformer.properties import Subject


class RelativeBias(nn.Module):
    def __init__(self, num_heads, bidirectional=True, num_buckets=32, max_distance=128):
        super().__init__()
        self.bidirectional = bidirectional
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, relative):
        """Bucket of key position minus query position.

        Half of the buckets of a direction are for exact distances, the other half for wider and wider ranges up to
        max_distance; all beyond it share the last one.
        """
        buckets = self.num_buckets
        first = torch.zeros_like(relative)
        if self.bidirectional:
            exact = buckets // 2
            buckets //= 2
            first = first + (relative > 0).to(relative.dtype) * buckets
            distance = relative.abs()
        else:
            exact = buckets // 2
            distance = (-relative).clamp(min=0)
        near = distance < exact
        octaves = torch.log2(distance.clamp(min=1).double() / exact)
        ratio = octaves / torch.log2(torch.tensor(self.max_distance / exact, dtype=torch.float64))
        far = exact + (ratio * (buckets - exact)).to(relative.dtype)
        far = far.clamp(max=buckets - 1)
        return first + torch.where(near, distance, far)

    def forward(self, queries, keys):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(queries, device=device)[:, None]
        memory = torch.arange(keys, device=device)[None, :]
        values = self.relative_attention_bias(self.bucket(memory - context))
        return values.permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
