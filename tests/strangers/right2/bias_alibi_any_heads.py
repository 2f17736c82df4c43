"""ALiBi for a number of heads that is no power of two: slopes of the power below, then every other slope of the power
above, as in the paper's code. Symmetric, -slope |i - j|. Unusual: slopes are not in falling order; right, that is ALiBi's."""
import math
import torch
from torch import nn
from veriformer.properties import Subject


def slopes(n):
    def power(n):
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    if math.log2(n).is_integer():
        return power(n)
    below = 2 ** math.floor(math.log2(n))
    return power(below) + slopes(2 * below)[0::2][: n - below]


class Alibi(nn.Module):
    def __init__(s, H):
        super().__init__()
        s.register_buffer("m", torch.tensor(slopes(H), dtype=torch.float64))
        s.register_buffer("like", torch.zeros(1))

    def forward(s, T, S):
        i, j = torch.arange(T, device=s.m.device), torch.arange(S, device=s.m.device)
        return (-s.m[:, None, None] * (i[:, None] - j).abs()).to(s.like.dtype)


args = dict(kind="position_bias", build=lambda c: Alibi(c.num_heads), forward=lambda m, query_len, key_len: m(query_len, key_len),
            domain={"num_heads": [3, 6], "d_model": [12, 24]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"positions": "alibi", "bidirectional": False})
