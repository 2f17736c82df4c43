WHAT = "torch.bucketize is left at right=False, so that a distance equal to a bucket's least distance falls into the bucket before: 0 and 1 share bucket 0, 2 is in bucket 1, and so on (line 33: `return side + torch.bucketize(relative.abs(), self.edges)`)."
"""T5's relative position bias, its logarithms replaced by one look-up among whole-number thresholds."""
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 32, 128


def thresholds(per_side, max_distance):
    """The least distance of each bucket but the first, of one direction."""
    exact = per_side // 2
    edges = list(range(1, exact + 1))
    for i in range(1, per_side - exact):
        edge = exact * (max_distance / exact) ** (i / (per_side - exact))
        edges.append(math.ceil(edge - 1e-9))
    return torch.tensor(edges)


class RelativePositionBias(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, num_heads)
        self.register_buffer("edges", thresholds(NUM_BUCKETS // 2, MAX_DISTANCE), persistent=False)

    def buckets(self, query_len, key_len):
        device = self.edges.device
        relative = torch.arange(key_len, device=device)[None, :] - torch.arange(query_len, device=device)[:, None]
        side = (relative > 0).long() * (NUM_BUCKETS // 2)
        return side + torch.bucketize(relative.abs(), self.edges)

    def forward(self, query_len, key_len):
        return self.relative_attention_bias(self.buckets(query_len, key_len)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 bias by bucketize",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE},
)
