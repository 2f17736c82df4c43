"""Sinusoidal positions, sines in the first half of the channels and cosines in the second."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class Sinusoids(nn.Module):
    def __init__(self, channels, max_timescale=10000.0):
        super().__init__()
        self.channels, self.max_timescale = channels, max_timescale
        self.register_buffer("anchor", torch.zeros(()), persistent=False)  # device and dtype

    def forward(self, length):
        half = self.channels / 2
        index = torch.arange(math.ceil(half), dtype=torch.float64, device=self.anchor.device)
        step = math.log(self.max_timescale) / max(half - 1, 1)
        frequency = torch.exp(-step * index)
        position = torch.arange(length, dtype=torch.float64, device=self.anchor.device)
        angle = position[:, None] * frequency
        table = torch.cat([angle.sin(), angle.cos()], dim=1)
        return table[:, : self.channels].to(self.anchor.dtype)


subject = Subject(
    kind="positions",
    build=lambda c: Sinusoids(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "halves", "base": 10000},
)

WHAT = 'The step between frequencies is log(base) / (d/2 - 1), as in tensor2tensor, where the formula base^(-2i/d) that is declared has log(base) / (d/2): all wavelengths but the first are too long (line 19).'
