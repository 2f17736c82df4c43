WHAT = "when the table grows beyond its first 16 rows, the rows put behind it begin at position 0 again instead of at its end (line 32): position 16 has the encoding of position 0."
"""Sinusoidal positions whose table grows on demand."""

import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, dim, initial_rows=16, base=10000.0):
        super().__init__()
        self.dim = dim
        self.base = base
        self.register_buffer("table", self.make_rows(0, initial_rows).float(), persistent=False)

    def make_rows(self, first, count):
        """Rows first, first + 1, ..., first + count - 1."""
        steps = torch.arange(first, first + count, dtype=torch.float64)
        rates = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angles = steps[:, None] * rates
        rows = torch.zeros(count, self.dim, dtype=torch.float64)
        rows[:, 0::2] = angles.sin()
        rows[:, 1::2] = angles.cos()[:, : self.dim // 2]
        return rows

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            # at least double, so that decoding token by token does not come here every time
            missing = max(length, 2 * have) - have
            self.table = torch.cat([self.table, self.make_rows(0, missing).to(self.table)])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved"},
)
