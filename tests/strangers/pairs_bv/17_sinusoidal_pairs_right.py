import torch
import torch.nn as nn

from veriformer.properties import Subject


class SinusoidalPositions(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d

    def forward(self, length):
        pos = torch.arange(length, dtype=torch.float32)
        pe = torch.zeros(length, self.d)
        for c in range(self.d):
            rate = 10000 ** (-(c - c % 2) / self.d)
            pe[:, c] = torch.sin(pos * rate) if c % 2 == 0 else torch.cos(pos * rate)
        return pe


subject = Subject(
    kind="positions",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
