"""ALiBi for encoders: minus slope times the distance to either side, for any number of heads.

Unusual: the same bias for past and future; slopes for a number of heads that is no power of two are those of the next smaller
power and every second one of the next larger, as in the paper's code. No parameters.
"""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def get_slopes(n: int) -> list[float]:
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return get_slopes(closest) + get_slopes(2 * closest)[0::2][: n - closest]


class SymmetricAlibi(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.slopes = get_slopes(heads)
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    def forward(self, query_len, key_len):
        i = torch.arange(query_len, device=self.anchor.device).view(-1, 1)
        j = torch.arange(key_len, device=self.anchor.device).view(1, -1)
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=self.anchor.device).view(-1, 1, 1)
        return (-slopes * (i - j).abs()).to(self.anchor.dtype)


COMMON = dict(
    kind="position_bias",
    build=lambda c: SymmetricAlibi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"positions": "alibi", "bidirectional": False})
