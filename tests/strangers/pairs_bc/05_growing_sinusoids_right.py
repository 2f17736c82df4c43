"""Sinusoidal positions in a buffer that grows when a longer sequence comes."""
import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, dim, initial=8, base=10000.0):
        super().__init__()
        self.dim = dim
        self.base = base
        self.register_buffer("table", self.rows(0, initial), persistent=False)

    def rows(self, start, stop):
        position = torch.arange(start, stop, dtype=torch.float64)[:, None]
        rate = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angle = position * rate
        table = torch.empty(stop - start, self.dim, dtype=torch.float64)
        table[:, 0::2] = angle.sin()
        table[:, 1::2] = angle.cos()[:, : self.dim // 2]
        return table.to(torch.get_default_dtype())

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            fresh = self.rows(have, length).to(self.table)
            self.table = torch.cat([self.table, fresh])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="sinusoids that grow",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved"},
)
