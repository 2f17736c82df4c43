"""ALiBi's biases (Press et al., 2022): head i of n has slope 2^(-8 i / n), i = 1 .. n."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Alibi(nn.Module):
    def __init__(self, heads, bad):
        super().__init__()
        first = 0 if bad else 1
        slopes = [2.0 ** (-8.0 * i / heads) for i in range(first, first + heads)]
        self.register_buffer("slopes", torch.tensor(slopes))

    def forward(self, queries, keys):
        t = torch.arange(queries, device=self.slopes.device)[:, None]
        s = torch.arange(keys, device=self.slopes.device)[None, :]
        return -self.slopes[:, None, None] * (t - s).abs()


def subject(bad):
    return Subject(kind="position_bias", build=lambda c: Alibi(c.num_heads, bad), forward=lambda m, t, s: m(t, s),
                   domain={"num_heads": [2, 4, 8]})


right, wrong = subject(False), subject(True)
WHAT = "The exponents of the ALiBi slopes start at 0 instead of 1: the slopes are 1, ... instead of 2^(-8/n), ..., 2^-8."
PLACE = "ALiBi slopes"
