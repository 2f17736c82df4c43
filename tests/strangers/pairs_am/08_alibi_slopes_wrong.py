WHAT = 'For heads that are no power of two the extra slopes are taken from the odd places of the longer list, which are those that the first heads have already: several heads share one slope (line 17).'
import math

import torch

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    p = 2 ** math.floor(math.log2(n))
    return power_of_2(p) + power_of_2(2 * p)[1::2][: n - p]


class Alibi(torch.nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(get_slopes(n_heads)), persistent=False)

    def forward(self, q_len, k_len):
        dev = self.slopes.device
        i = torch.arange(k_len - q_len, k_len, device=dev).unsqueeze(1)
        j = torch.arange(k_len, device=dev).unsqueeze(0)
        return -self.slopes.view(-1, 1, 1) * (i - j).abs().to(self.slopes.dtype)


subject = Subject(
    kind="position_bias",
    name="ALiBi",
    build=lambda c: Alibi(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "alibi", "slopes": "interleaved"},
)
