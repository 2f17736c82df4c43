WHAT = "bucketize without right=True puts the first distance of each logarithmic bucket (6, 8, 12) into the bucket before it (line 27)."
"""T5's relative bias without logarithms: the boundaries of the buckets are whole numbers, made once."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class RelativeBias(nn.Module):
    """For decoders: all distances into the future share bucket 0. Half of the buckets hold one distance
    each, the others grow logarithmically up to max_distance, beyond which all share the last."""

    def __init__(self, heads, buckets=8, max_distance=16):
        super().__init__()
        self.buckets, self.exact = buckets, buckets // 2
        self.table = nn.Embedding(buckets, heads)
        wide = buckets - self.exact
        growth = max_distance / self.exact
        starts = [math.ceil(self.exact * growth ** (index / wide) - 1e-9) for index in range(1, wide)]
        self.register_buffer("starts", torch.tensor(starts), persistent=False)

    def bucket(self, distance):
        """Distances >= 0 to the number of their bucket; starts[i] is the smallest distance of its bucket."""
        far = self.exact + torch.bucketize(distance, self.starts)
        return torch.where(distance < self.exact, distance, far)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        queries = torch.arange(query_len, device=device)[:, None]
        keys = torch.arange(key_len, device=device)[None]
        distance = (queries - keys).clamp(min=0)
        return self.table(self.bucket(distance)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias by boundaries",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "num_buckets": 8, "max_distance": 16, "bidirectional": False},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(4, 4).shape)
