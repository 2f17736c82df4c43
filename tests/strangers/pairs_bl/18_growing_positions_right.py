import math

import torch
from torch import nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    """Sines and cosines, interleaved. The table begins small and grows when a longer sequence comes."""

    def __init__(self, d_model, initial=6):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("table", self.rows(0, initial), persistent=False)

    def rows(self, start, stop):
        position = torch.arange(start, stop, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, self.d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / self.d_model))
        out = torch.zeros(stop - start, self.d_model, dtype=torch.float64)
        out[:, 0::2] = torch.sin(position * div_term)
        out[:, 1::2] = torch.cos(position * div_term[: self.d_model // 2])
        return out.to(torch.get_default_dtype())

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            more = self.rows(have, length)
            self.table = torch.cat([self.table, more.to(self.table)])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000.0, "beyond_max_len": "works"},
)
