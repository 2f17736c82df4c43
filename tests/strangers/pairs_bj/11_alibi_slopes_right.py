"""ALiBi's table for any number of heads."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + power_of_2(2 * closest)[0::2][: n - closest]


class Alibi(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(get_slopes(num_heads), dtype=torch.float32), persistent=False)

    def forward(self, query_len, key_len):
        i = torch.arange(query_len, device=self.slopes.device).view(-1, 1)
        j = torch.arange(key_len, device=self.slopes.device).view(1, -1)
        return self.slopes.view(-1, 1, 1) * -(i - j).abs()


subject = Subject(
    kind="position_bias",
    name="ALiBi",
    build=lambda c: Alibi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    domain={"d_model": (12, 24), "num_heads": (3, 4, 6, 12)},
    declares={"positions": "alibi", "slopes": "interleaved"},
)
