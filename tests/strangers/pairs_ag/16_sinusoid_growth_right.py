"""Sinusoidal positions whose table grows when a longer sequence comes."""
import math

import torch

from veriformer.properties import Subject


class SinusoidalPositions(torch.nn.Module):
    INITIAL = 8

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("table", self.rows(0, self.INITIAL), persistent=False)

    def rows(self, start, stop):
        position = torch.arange(stop - start, dtype=torch.float64)[:, None] + start
        rate = torch.exp(torch.arange(0, self.d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / self.d_model))
        out = torch.zeros(stop - start, self.d_model, dtype=torch.float64)
        out[:, 0::2] = torch.sin(position * rate)
        out[:, 1::2] = torch.cos(position * rate)[:, : self.d_model // 2]
        return out.to(torch.get_default_dtype())

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            want = max(length, 2 * have)
            fresh = self.rows(have, want).to(self.table)
            self.table = torch.cat((self.table, fresh))
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"},
)
