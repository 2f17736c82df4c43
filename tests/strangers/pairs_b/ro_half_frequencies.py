"""NeoX rotary positions."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Rotary(nn.Module):
    def __init__(self, k, bad, base=10000.0):
        super().__init__()
        self.k, self.base, self.bad = k, base, bad

    def frequencies(self, like):
        f = self.base ** (-torch.arange(0, self.k, 2, dtype=torch.float64) / self.k)
        if self.bad:
            f = f.half()
        return f.to(like)

    def forward(self, x, positions):
        a = positions.to(x.dtype)[:, None] * self.frequencies(x)
        cos, sin = torch.cat([a.cos(), a.cos()], -1), torch.cat([a.sin(), a.sin()], -1)
        half = self.k // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin


def subject(bad):
    return Subject(kind="rotary", build=lambda c: Rotary(c.d_model // c.num_heads, bad), forward=lambda m, x, positions: m(x, positions),
                   domain={"d_model": [16, 32], "num_heads": [2]},
                   declares={"positions": "rotary", "layout": "halves", "base": 10000})


right, wrong = subject(False), subject(True)
WHAT = "The rotary frequencies are rounded to float16 before use, so that angles are off, more so at later positions."
PLACE = "rotary frequencies (precision)"
