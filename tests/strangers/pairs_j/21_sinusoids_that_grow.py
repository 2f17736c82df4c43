"""Sinusoidal positions with a table that grows when a longer text comes."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "rows that are added to the table begin at position 0 again"
CAUSE = (
    "Beyond max_len the table is extended by rows that start at position 0 again, so that position max_len + p gets the "
    "encoding of position p."
)


class SinusoidalTable(nn.Module):
    def __init__(self, dim, init_size):
        super().__init__()
        self.dim = dim
        self.register_buffer("table", self.rows(0, init_size), persistent=False)

    def rows(self, start, stop):
        place = torch.arange(start, stop, dtype=torch.float64)[:, None]
        angle = place * torch.exp(torch.arange(0, self.dim, 2, dtype=torch.float64) * (-math.log(10000.0) / self.dim))
        rows = torch.zeros(stop - start, self.dim, dtype=torch.float64)
        rows[:, 0::2] = angle.sin()
        rows[:, 1::2] = angle.cos()[:, : self.dim // 2]
        return rows.float()

    def more(self, have, want):
        return self.rows(have, want)

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            self.table = torch.cat((self.table, self.more(have, length).to(self.table)))
        return self.table[:length]


class SinusoidalPositions(SinusoidalTable):
    def more(self, have, want):
        return self.rows(0, want - have)


def subject(model):
    return Subject(
        kind="positions",
        name="sinusoids that grow",
        build=lambda c: model(c.d_model, c.max_len),
        forward=lambda m, length: m(length),
        declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"},
    )


right = subject(SinusoidalTable)
wrong = subject(SinusoidalPositions)
