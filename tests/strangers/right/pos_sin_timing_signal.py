"""tensor2tensor's timing signal: sines then cosines, wavelengths from 2 pi to 10000 * 2 pi with both ends included.

Unusual: the exponents run over half - 1 steps, so the last channel has the wavelength 10000 * 2 pi itself. For a width of 16
(8 rates) that is the paper's formula with a base of 10000^(8/7), which is what is declared; other widths are not built.
"""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WIDTH = 16


class TimingSignal(nn.Module):
    def __init__(self, channels, min_timescale=1.0, max_timescale=1.0e4):
        super().__init__()
        num_timescales = channels // 2
        increment = math.log(max_timescale / min_timescale) / (num_timescales - 1)
        self.inv_timescales = [min_timescale * math.exp(-i * increment) for i in range(num_timescales)]
        self.register_buffer("anchor", torch.zeros(()), persistent=False)

    def forward(self, length):
        rates = torch.tensor(self.inv_timescales, dtype=torch.float64, device=self.anchor.device)
        scaled_time = torch.outer(torch.arange(length, dtype=torch.float64, device=self.anchor.device), rates)
        return torch.cat([scaled_time.sin(), scaled_time.cos()], dim=1).type_as(self.anchor)


COMMON = dict(
    kind="positions",
    build=lambda c: TimingSignal(c.d_model),
    forward=lambda m, length: m(length),
    domain={"d_model": [WIDTH]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "positions": "sinusoidal",
        "layout": "halves",
        "base": 10000.0 ** ((WIDTH // 2) / (WIDTH // 2 - 1)),
    },
)
