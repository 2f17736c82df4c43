WHAT = 'When the table of sinusoids is too short its new rows are numbered from 0 again (`rows = torch.arange(length - have)` instead of have .. length - 1), so position 8, where it first grows, looks like position 0.'
"""Sinusoidal positions in a table that grows when a longer sequence comes."""

import torch
from torch import nn

from veriformer.properties import Subject


class GrowingSinusoids(nn.Module):
    def __init__(self, d_model, rows=8, base=10000.0):
        super().__init__()
        self.d_model, self.base = d_model, base
        self.register_buffer("table", self.encode(torch.arange(rows)), persistent=False)

    def encode(self, rows):
        channel = torch.arange(self.d_model, device=rows.device)
        exponent = (channel - channel % 2).double() / self.d_model
        angle = rows.double()[:, None] * self.base**-exponent
        return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(torch.get_default_dtype())

    def grow(self, length):
        have = self.table.shape[0]
        if length > have:
            rows = torch.arange(length - have, device=self.table.device)
            self.table = torch.cat((self.table, self.encode(rows).to(self.table.dtype)))

    def forward(self, length):
        self.grow(length)
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: GrowingSinusoids(c.d_model),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
