"""Sinusoidal positions from a table that grows on demand; rows once made are kept."""

import torch
from torch import nn

from veriformer.properties import Subject


class GrowingSinusoid(nn.Module):
    def __init__(self, d_model, base=10000.0, initial=8):
        super().__init__()
        if d_model % 2:
            raise ValueError("sine and cosine come in pairs: d_model must be even")
        self.rates = base ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        self.register_buffer("anchor", torch.empty(0), persistent=False)  # follows .to(device, dtype)
        self.table = self._rows(0, initial)

    def _rows(self, start, stop):
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * self.rates
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            grown = max(length, 2 * have)  # amortised
            self.table = torch.cat([self.table, self._rows(have, grown)])
        return self.table[:length].to(self.anchor)


subject = Subject(
    kind="positions",
    name="growing sinusoid",
    build=lambda c: GrowingSinusoid(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000.0, "beyond_max_len": "works"},
)
