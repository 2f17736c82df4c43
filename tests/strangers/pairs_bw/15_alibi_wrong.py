WHAT = "for heads that are no power of two the additional slopes are the first ones of the next power's list ([: heads - closest]) in place of every other one ([0::2]), so some slopes are wrong and two heads may be alike"
import math
import torch
from torch import nn
from veriformer.properties import Subject


def slopes(heads):
    def of_power(n):
        start = 2 ** (-8.0 / n)
        return [start ** (i + 1) for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + of_power(2 * closest)[: heads - closest]


class Alibi(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.register_buffer("slopes", torch.tensor(slopes(heads)), persistent=False)

    def forward(self, query_len, key_len):
        queries = torch.arange(key_len - query_len, key_len, device=self.slopes.device)
        keys = torch.arange(key_len, device=self.slopes.device)
        distance = (queries[:, None] - keys[None, :]).abs()
        return -self.slopes[:, None, None] * distance


subject = Subject(kind="position_bias", build=lambda c: Alibi(c.num_heads), domain={'num_heads': [6, 12], 'd_model': [24, 48]}, forward=lambda m, query_len, key_len: m(query_len, key_len),
                  declares={"positions": "alibi", "slopes": "interleaved"})
