"""T5's bidirectional relative bias where the bucket of each distance is looked up in a table made with integers alone.

Unusual: no logarithm. In floating point log(d / 8) / log(16) * 8 may fall just under a whole number; here both sides are raised
to the eighth power and compared as whole numbers, which is the formula's exact value. 32 buckets, 128 the farthest.
"""

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FARTHEST = 32, 128


def side_bucket(distance: int) -> int:
    """Bucket of a distance to one side, of BUCKETS / 2: exact below 8, then 8 steps on a log scale up to 128.

    floor(8 * log(d / 8) / log(128 / 8)) >= k  <=>  (d / 8)^8 >= 16^k, in whole numbers d^8 >= 16^k * 8^8
    """
    half = BUCKETS // 2
    exact = half // 2
    if distance < exact:
        return distance
    steps = half - exact
    k = 0
    while k < steps - 1 and distance**steps >= (FARTHEST // exact) ** (k + 1) * exact**steps:
        k += 1
    return exact + k


SIDE = [side_bucket(d) for d in range(FARTHEST + 1)]


class RelativeBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Parameter(torch.randn(BUCKETS, heads))
        self.register_buffer("side", torch.tensor(SIDE), persistent=False)

    def forward(self, query_len, key_len):
        device = self.table.device
        relative = torch.arange(key_len, device=device) - torch.arange(query_len, device=device).unsqueeze(1)
        bucket = self.side[relative.abs().clamp(max=FARTHEST)]
        bucket = bucket + (relative > 0) * (BUCKETS // 2)
        return self.table[bucket].movedim(-1, 0)


COMMON = dict(
    kind="position_bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"positions": "t5", "num_buckets": BUCKETS, "max_distance": FARTHEST, "bidirectional": True},
)
