WHAT = "when the table grows, the new rows are computed for positions that start at 0 again and not at the rows already there: positions past the first page repeat the first ones (line 33)"
"""Sinusoidal positions, kept in a table that grows in pages when a longer sequence comes."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class GrowingSinusoid(nn.Module):
    PAGE = 8

    def __init__(self, dim):
        super().__init__()
        if dim % 2:
            raise ValueError("even widths only")
        self.dim = dim
        self.register_buffer("table", self.rows(0, self.PAGE), persistent=False)

    def rows(self, start, stop):
        position = torch.arange(start, stop, dtype=torch.float64).unsqueeze(1)
        rate = torch.exp(torch.arange(0, self.dim, 2, dtype=torch.float64) * (-math.log(10000.0) / self.dim))
        page = torch.empty(stop - start, self.dim)
        page[:, 0::2] = torch.sin(position * rate).float()
        page[:, 1::2] = torch.cos(position * rate).float()
        return page

    def forward(self, length):
        have = self.table.size(0)
        if length > have:
            need = math.ceil(length / self.PAGE) * self.PAGE
            fresh = self.rows(0, need - have).to(self.table)
            self.table = torch.cat([self.table, fresh])
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="growing sinusoid",
    build=lambda c: GrowingSinusoid(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved"},
)
