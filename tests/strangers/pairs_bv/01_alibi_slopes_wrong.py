WHAT = "the extra ALiBi slopes of a head count that is no power of two are taken from the odd places of the doubled list, which repeats the slopes that are there already instead of interleaving (line 18: return power_of_two(closest) + get_slopes(2 * closest)[1::2][: n - closest])"
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + get_slopes(2 * closest)[1::2][: n - closest]


class Alibi(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(get_slopes(heads)).view(-1, 1, 1), persistent=False)

    def forward(self, query_len, key_len):
        q = torch.arange(key_len - query_len, key_len)[:, None]
        k = torch.arange(key_len)[None, :]
        return -self.slopes * (q - k).abs()


subject = Subject(
    kind="position_bias",
    build=lambda c: Alibi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "alibi", "slopes": "interleaved"},
    domain={"num_heads": (3, 6), "d_model": (24, 48)},
)
