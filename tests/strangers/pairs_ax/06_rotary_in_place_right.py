"""Rotary embedding that writes into one copy of its input, to keep the peak of memory low."""

import torch

from veriformer.properties import Subject


class InPlaceRotary(torch.nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("rotary pairs need an even head_dim")
        self.half = head_dim // 2
        self.base = base

    def tables(self, positions, dtype):
        exponents = torch.arange(self.half, dtype=torch.float64, device=positions.device) / self.half
        angles = positions.to(torch.float64)[:, None] * self.base**-exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x, positions):
        cos, sin = self.tables(positions, x.dtype)
        out = x.clone()
        first, second = out[..., : self.half], out[..., self.half :]
        kept = first.clone()
        first.mul_(cos).sub_(second * sin)
        second.mul_(cos).add_(kept * sin)
        return out


subject = Subject(
    kind="rotary",
    name="rotary in place",
    build=lambda c: InPlaceRotary(c.d_head),
    forward=lambda model, x, positions: model(x, positions),
    declares={"positions": "rotary", "layout": "halves", "base": 10000},
)
