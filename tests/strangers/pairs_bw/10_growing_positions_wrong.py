WHAT = "when the sinusoidal table grows, the new rows start at position have + 1 in place of have: a position is skipped and all rows behind the first table are those of the next position"
import math
import torch
from torch import nn
from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, dim, size=8):
        super().__init__()
        self.dim = dim
        self.register_buffer("table", self.rows(0, size), persistent=False)

    def rows(self, first, count):
        t = torch.arange(first, first + count, dtype=torch.float64)[:, None]
        i = torch.arange(0, self.dim, 2, dtype=torch.float64)
        angle = t * torch.exp(i * (-math.log(10000.0) / self.dim))
        out = torch.zeros(count, self.dim, dtype=torch.float64)
        out[:, 0::2] = angle.sin()
        out[:, 1::2] = angle.cos()[:, : self.dim // 2]
        return out.to(torch.get_default_dtype())

    def forward(self, length):
        have = self.table.size(0)
        if length > have:
            more = self.rows(have + 1, max(length, 2 * have) - have).to(self.table)
            self.table = torch.cat([self.table, more])
        return self.table[:length]


subject = Subject(kind="positions", build=lambda c: SinusoidalPositions(c.d_model), forward=lambda m, length: m(length),
                  declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"})
