"""Rotary embedding, interleaved pairs, written into one copy of the input to save memory."""

import torch
from torch import nn

from veriformer.properties import Subject


class Rotary(nn.Module):
    def __init__(self, base: float = 10000.0):
        super().__init__()
        self.base = base

    @torch.no_grad()
    def angles(self, positions, dim):
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
        theta = positions.double().unsqueeze(-1) * self.base ** (-exponent)
        return theta.cos(), theta.sin()

    def forward(self, x, positions):
        cos, sin = (t.to(x.dtype) for t in self.angles(positions, x.size(-1)))
        rotated = x.clone()
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated[..., 0::2] = even * cos - odd * sin
        rotated[..., 1::2] = even * sin + odd * cos
        return rotated


subject = Subject(
    kind="rotary",
    name="rotary in one copy",
    build=lambda c: Rotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000.0},
)
