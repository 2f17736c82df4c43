import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The exponent of the wavelengths counts pairs (0, 1, 2, ... over d) instead of channels (0, 2, 4, ... '
    'over d), so wavelengths reach only the square root of 10000 and are wrong from the second pair on.'
)
PLACE = 'wavelengths of the sinusoidal positions'


class Sinusoids(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    def forward(self, length):
        at = torch.arange(length, dtype=torch.float64, device=self.anchor.device)[:, None]
        i = torch.arange(0, self.d, 2, dtype=torch.float64, device=self.anchor.device)
        angle = at * torch.exp(-math.log(10000.0) * i / self.d)
        table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : self.d]
        return table.to(self.anchor.dtype)


class Sinusoids2(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    def forward(self, length):
        at = torch.arange(length, dtype=torch.float64, device=self.anchor.device)[:, None]
        i = torch.arange((self.d + 1) // 2, dtype=torch.float64, device=self.anchor.device)
        angle = at * torch.exp(-math.log(10000.0) * i / self.d)
        table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : self.d]
        return table.to(self.anchor.dtype)


right = Subject(
    kind="positions",
    build=lambda c: Sinusoids(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

wrong = Subject(
    kind="positions",
    build=lambda c: Sinusoids2(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
