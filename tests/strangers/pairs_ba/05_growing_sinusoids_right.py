# Sinusoidal positions with a table that is grown when a longer sequence comes.
import math

import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, dim, initial=16):
        super().__init__()
        self.dim = dim
        self.register_buffer("table", self.rows(0, initial).to(torch.get_default_dtype()), persistent=False)

    def rows(self, start, stop):
        position = torch.arange(start, stop, dtype=torch.float64).unsqueeze(1)
        rate = torch.exp(torch.arange(0, self.dim, 2, dtype=torch.float64) * (-math.log(10000.0) / self.dim))
        out = torch.zeros(stop - start, self.dim, dtype=torch.float64)
        out[:, 0::2] = torch.sin(position * rate)
        out[:, 1::2] = torch.cos(position * rate[: self.dim // 2])
        return out

    def forward(self, length):
        have = self.table.size(0)
        if length > have:
            want = max(length, 2 * have)
            extra = self.rows(have, want)
            self.table = torch.cat([self.table, extra.to(self.table)])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000, "beyond_max_len": "works"},
)
