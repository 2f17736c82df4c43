WHAT = 'when the table is grown beyond the 8 rows that it starts with, the new rows are counted from 0 again (line 28) instead of from the number of rows there are'
"""Sinusoidal positions in a table that grows when a longer sequence comes."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, d_model, initial=8):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("table", self._rows(torch.arange(initial)).float(), persistent=False)

    def _rows(self, positions):
        positions = positions.double()[:, None]
        rates = torch.exp(torch.arange(0, self.d_model, 2).double() * (-math.log(10000.0) / self.d_model))
        rows = torch.zeros(len(positions), self.d_model, dtype=torch.float64)
        rows[:, 0::2] = torch.sin(positions * rates)
        rows[:, 1::2] = torch.cos(positions * rates[: self.d_model // 2])
        return rows

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            more = self._rows(torch.arange(length - have))
            self.table = torch.cat([self.table, more.to(self.table)])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing positions",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
