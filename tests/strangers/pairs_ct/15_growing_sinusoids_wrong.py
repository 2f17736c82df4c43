"""Sinusoidal positions in a table that grows when a longer clip comes (speech)."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class GrowingSinusoids(nn.Module):
    def __init__(self, width, first=16):
        super().__init__()
        self.width = width
        self.register_buffer("like", torch.zeros(()), persistent=False)
        self.table = self.rows(torch.arange(first))

    def rows(self, places):
        pe = torch.zeros(len(places), self.width, dtype=torch.float64)
        rate = torch.exp(torch.arange(0, self.width, 2, dtype=torch.float64) * (-math.log(10000.0) / self.width))
        angle = places.double().unsqueeze(1) * rate
        pe[:, 0::2] = angle.sin()
        pe[:, 1::2] = angle.cos()[:, : self.width // 2]
        return pe

    def forward(self, length):
        have = len(self.table)
        if length > have:
            more = torch.arange(max(length, 2 * have) - have)
            self.table = torch.cat((self.table, self.rows(more)))
        return self.table[:length].to(self.like)


subject = Subject(
    kind="positions",
    name="growing sinusoids",
    build=lambda c: GrowingSinusoids(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000, "beyond_max_len": "works"},
)

WHAT = 'The rows that are added begin at position 0 again (line 28): from position 16 on the positions repeat those of the beginning.'
