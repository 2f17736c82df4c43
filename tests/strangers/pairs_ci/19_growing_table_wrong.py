"""Sinusoidal positions in a table that grows when a longer sequence comes."""
import torch
from torch import nn

from veriformer.properties import Subject


class Positions(nn.Module):
    def __init__(self, d, first):
        super().__init__()
        self.d = d
        self.register_buffer("like", torch.zeros(()), persistent=False)
        self.rows = self.make(torch.arange(first))

    def make(self, positions):
        angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, self.d, 2).double() / self.d)
        table = torch.zeros(len(positions), self.d, dtype=torch.float64)
        table[:, 0::2] = angle.sin()
        table[:, 1::2] = angle.cos()[:, : self.d // 2]
        return table

    def forward(self, length):
        have = len(self.rows)
        if length > have:
            more = self.make(torch.arange(length - have))
            self.rows = torch.cat([self.rows, more])
        return self.rows[:length].to(self.like)


subject = Subject(
    kind="positions",
    name="growing table",
    build=lambda c: Positions(c.d_model, c.max_len),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"},
)

WHAT = (
    'The rows that are appended start from position 0 again: beyond the first length positions repeat those of the beginning'
    ' (line 25).'
)
