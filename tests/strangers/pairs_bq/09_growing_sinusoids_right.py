import math

import torch
from torch import nn

from veriformer.properties import Subject


class PagedSinusoids(nn.Module):
    """Sinusoidal positions in a table that grows by pages when a longer sequence comes along."""

    PAGE = 4

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("anchor", torch.empty(0), persistent=False)  # carries dtype and device
        self.filled = 0
        self.table = torch.empty(0, d_model, dtype=torch.float64)

    def page(self, first):
        t = torch.arange(first, first + self.PAGE, dtype=torch.float64)[:, None]
        rate = torch.exp(torch.arange(0, self.d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / self.d_model))
        rows = torch.empty(self.PAGE, self.d_model, dtype=torch.float64)
        rows[:, 0::2] = torch.sin(t * rate)
        rows[:, 1::2] = torch.cos(t * rate)[:, : self.d_model // 2]
        return rows

    def reserve(self, length):
        pages = [self.table]
        missing = max(0, length - self.table.shape[0])
        for _ in range(-(-missing // self.PAGE)):
            pages.append(self.page(self.filled))
            self.filled += self.PAGE
        self.table = torch.cat(pages)

    def forward(self, length):
        self.reserve(length)
        return self.table[:length].to(self.anchor)


subject = Subject(
    kind="positions",
    name="sinusoids by pages",
    build=lambda c: PagedSinusoids(c.d_model),
    forward=lambda model, length: model(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
