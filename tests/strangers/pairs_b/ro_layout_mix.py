"""Rotary positions as in the paper: channels 2i and 2i + 1 turn together."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def rotate_every_two(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


class Rotary(nn.Module):
    def __init__(self, k, bad):
        super().__init__()
        self.k, self.bad = k, bad

    def forward(self, x, positions):
        f = 10000.0 ** (-torch.arange(0, self.k, 2, dtype=x.dtype, device=x.device) / self.k)
        a = positions.to(x.dtype)[:, None] * f
        a = torch.cat([a, a], -1) if self.bad else a.repeat_interleave(2, -1)
        return x * a.cos() + rotate_every_two(x) * a.sin()


def subject(bad):
    return Subject(kind="rotary", build=lambda c: Rotary(c.d_model // c.num_heads, bad), forward=lambda m, x, positions: m(x, positions),
                   domain={"d_model": [16, 32], "num_heads": [2]})


right, wrong = subject(False), subject(True)
WHAT = "Sines and cosines are laid out in halves while the channels are rotated in neighbouring pairs: the two channels of a pair turn by different angles, which is no rotation."
PLACE = "layout of the rotary angles"
