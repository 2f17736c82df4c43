"""Sinusoidal positions whose table grows by chunks when a longer sequence comes by."""

import torch
from torch import nn

from veriformer.properties import Subject


class GrowingSinusoids(nn.Module):
    CHUNK = 16

    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("table", self._rows(0, self.CHUNK), persistent=False)

    def _rows(self, first, last):
        """Rows first .. last - 1 of the table; angles in float64, since far positions lose their digits otherwise."""
        position = torch.arange(first, last, dtype=torch.float64).unsqueeze(1)
        channel = torch.arange(0, self.dim, 2, dtype=torch.float64)
        angle = position / self.base ** (channel / self.dim)
        rows = torch.empty(last - first, self.dim, dtype=torch.float64)
        rows[:, 0::2] = angle.sin()
        rows[:, 1::2] = angle[:, : self.dim // 2].cos()
        return rows.to(torch.get_default_dtype())

    def forward(self, length):
        while self.table.size(0) < length:
            known = self.table.size(0)
            more = self._rows(known, known + self.CHUNK)
            self.table = torch.cat([self.table, more.to(self.table)])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: GrowingSinusoids(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000.0, "beyond_max_len": "works"},
)
