"""ALiBi (Press et al. 2022) with the authors' slopes for any number of heads."""
import math

import torch
from torch import nn
from veriformer.properties import Subject


def power_of_two_slopes(n):
    start = 2.0 ** (-8.0 / n)
    return [start ** (i + 1) for i in range(n)]


def get_slopes(n):
    closest = 2 ** math.floor(math.log2(n))
    slopes = power_of_two_slopes(closest)
    # every other slope of twice as many heads lies between those we have
    slopes += power_of_two_slopes(2 * closest)[1::2][: n - closest]
    return slopes


class ALiBi(nn.Module):
    def __init__(self, num_heads):
        super().__init__()
        self.slopes = get_slopes(num_heads)
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    def forward(self, query_len, key_len):
        if query_len != key_len:
            raise ValueError("made for as many queries as keys")
        pos = torch.arange(query_len, device=self.anchor.device)
        distance = (pos[:, None] - pos[None, :]).abs().to(self.anchor.dtype)
        slopes = torch.tensor(self.slopes, dtype=self.anchor.dtype, device=self.anchor.device)
        return -slopes[:, None, None] * distance


subject = Subject(
    kind="position_bias",
    build=lambda c: ALiBi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "alibi", "slopes": "interleaved", "equal_lengths": True},
)

WHAT = 'Line 18: of the slopes for twice as many heads the odd ones are taken, which are those that exist already; with 3, 5, 6 ... heads pairs of heads have equal slopes.'
