"""Interleaved rotary embedding, rotated in place in one buffer."""

import torch
from torch import nn

from veriformer.properties import Subject


class InplaceRotary(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base

    def angles(self, positions, width):
        rates = self.base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
        return positions.double()[:, None] * rates

    def forward(self, x, positions):
        if x.shape[-1] % 2:
            raise ValueError("an odd width cannot be rotated in pairs")
        out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        angles = self.angles(positions, x.shape[-1])
        cos, sin = angles.cos().to(out.dtype), angles.sin().to(out.dtype)
        a, b = out[..., 0::2], out[..., 1::2]
        before = a.clone()
        a.mul_(cos).sub_(b * sin)
        b.mul_(cos).add_(before * sin)
        return out.to(x.dtype)


subject = Subject(
    kind="rotary",
    name="in-place rotary",
    build=lambda c: InplaceRotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000.0},
)
