"""Rotary embedding in the manner of Llama (halves), tables kept between calls."""
import torch
from torch import nn

from veriformer.properties import Subject


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        if dim % 2:
            raise ValueError("rotary needs an even head dim")
        self.dim, self.base = dim, base
        self._positions = None
        self._cos = self._sin = None

    def _update(self, positions):
        if self._positions is not None and torch.equal(self._positions, positions):
            return
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device) / self.dim
        angles = torch.outer(positions.double(), self.base**-exponent)
        angles = torch.cat((angles, angles), dim=-1)
        self._positions = positions.clone()
        self._cos, self._sin = angles.cos(), angles.sin()

    def forward(self, x, positions):
        self._update(positions)
        cos, sin = self._cos.to(x), self._sin.to(x)
        return x * cos + rotate_half(x) * sin


subject = Subject(
    kind="rotary",
    name="rotary with kept tables",
    build=lambda c: RotaryEmbedding(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "base": 10000},
)
