"""A sinusoidal table with sines in the first half and cosines in the second, grown on demand."""
import torch
from torch import nn
from veriformer.properties import Subject

class Sinusoids(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d = c.d_model
        self.register_buffer("table", self.make(c.max_len), persistent=False)

    def make(self, n):
        half = self.d // 2
        freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        ang = torch.arange(n, dtype=torch.float64)[:, None] * freq[None]
        return torch.cat([ang.sin(), ang.cos()], 1).to(torch.get_default_dtype())

    def forward(self, n):
        if n > len(self.table):
            self.table = self.make(2 * n).to(self.table)
        return self.table[:n]

common = dict(kind="positions", build=Sinusoids, forward=lambda m, n: m(n), domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]})
undeclared = Subject(**common)
declared = Subject(**common, declares={"positions": "sinusoidal", "layout": "halves", "base": 10000.0, "beyond_max_len": "works"})
