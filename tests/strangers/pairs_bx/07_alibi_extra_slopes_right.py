import math

import torch

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + power_of_2(2 * closest)[0::2][: n - closest]


class Alibi(torch.nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(get_slopes(heads))[:, None, None], persistent=False)

    def forward(self, query_len, key_len):
        i = torch.arange(query_len, device=self.slopes.device)
        j = torch.arange(key_len, device=self.slopes.device)
        return -(i[:, None] - j[None, :]).abs() * self.slopes


subject = Subject(
    kind="position_bias",
    name="symmetric ALiBi",
    build=lambda c: Alibi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    domain={"num_heads": (2, 3, 4, 6)},
    declares={"positions": "alibi", "slopes": "interleaved", "bidirectional": False},
)
