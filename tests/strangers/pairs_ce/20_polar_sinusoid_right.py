import torch
from torch import nn

from veriformer.properties import Subject


class PolarPositions(nn.Module):
    """All sines and cosines in one call, as complex numbers."""

    def __init__(self, d_model, base=10000.0):
        super().__init__()
        self.register_buffer("freq", base ** (-torch.arange(0, d_model, 2).double() / d_model), persistent=False)

    def forward(self, length):
        freq = self.freq.double()
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=freq.device), freq)
        pairs = torch.view_as_real(torch.polar(torch.ones_like(angle), angle))
        return pairs.flip(-1).flatten(-2).float()


subject = Subject(
    kind="positions",
    name="polar sinusoids",
    build=lambda c: PolarPositions(c.d_model),
    forward=lambda m, length: m(length),
    domain={"d_model": [8, 16, 32], "num_heads": [1, 2, 4]},
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
