"""Sinusoidal positions from two short tables, joined by the addition theorems (an accelerator without fast sines)."""

import torch
from torch import nn

from veriformer.properties import Subject


class TwoTables(nn.Module):
    STRIDE = 4

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.register_buffer("like", torch.zeros(1))

    def table(self, count, step):
        """Sines and cosines of 0, step, 2 step ... at every wavelength."""
        even = torch.arange(0, self.width, 2, dtype=torch.float64, device=self.like.device)
        steps = step * torch.arange(count, dtype=torch.float64, device=self.like.device)
        angles = steps[:, None] * 10000.0 ** (-even / self.width)
        return angles.sin(), angles.cos()

    def forward(self, length):
        position = torch.arange(length, device=self.like.device)
        coarse, fine = position // self.STRIDE, position % self.STRIDE
        coarse_sin, coarse_cos = (x[coarse] for x in self.table(length // self.STRIDE + 1, self.STRIDE))
        fine_sin, fine_cos = (x[fine] for x in self.table(self.STRIDE, 1))
        sin = coarse_sin * fine_cos + coarse_cos * fine_sin
        cos = coarse_cos * fine_cos - coarse_sin * fine_sin
        both = torch.stack((sin, cos), dim=-1).flatten(1)
        return both[:, : self.width].to(self.like.dtype)


subject = Subject(
    kind="positions",
    build=lambda c: TwoTables(c.d_model),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
