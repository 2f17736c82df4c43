"""ALiBi with the slopes of its authors, heads that are no power of two among them."""

import math

import torch

from veriformer.properties import Subject


def get_slopes(n):
    def get_slopes_power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        ratio = start
        return [start * ratio**i for i in range(n)]

    if math.log2(n).is_integer():
        return get_slopes_power_of_2(n)
    closest_power_of_2 = 2 ** math.floor(math.log2(n))
    return get_slopes_power_of_2(closest_power_of_2) + get_slopes(2 * closest_power_of_2)[0::2][: n - closest_power_of_2]


class Alibi(torch.nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(get_slopes(heads)).view(heads, 1, 1), persistent=False)

    def forward(self, query_len, key_len):
        i = torch.arange(query_len, device=self.slopes.device)
        j = torch.arange(key_len, device=self.slopes.device)
        distance = (j[None, :] - i[:, None]).abs()
        return -self.slopes * distance


subject = Subject(
    kind="position_bias",
    name="ALiBi",
    build=lambda c: Alibi(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    domain={"d_model": (12, 24), "num_heads": (2, 3, 4, 6, 12)},
    declares={"positions": "alibi", "slopes": "interleaved"},
)
