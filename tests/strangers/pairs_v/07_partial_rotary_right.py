"""Partial rotary positions: the first channels of a head are rotated, the others pass through."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class PartialRotary(nn.Module):
    """Angles are made in float64 from the positions that are given, and rounded once."""

    def __init__(self, rotary_dim, base=10000.0):
        super().__init__()
        if rotary_dim % 2:
            raise ValueError("an even number of channels is rotated")
        self.rotary_dim, self.base = rotary_dim, base

    def rates(self, width, device):
        """Radians per position of every pair of channels."""
        if width < self.rotary_dim:
            raise ValueError(f"heads of {width} channels, of which {self.rotary_dim} are to be rotated")
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=device) / self.rotary_dim
        return self.base**-exponents

    def forward(self, x, positions):
        """x [B, H, T, K], positions [T]."""
        angles = positions.to(torch.float64)[:, None] * self.rates(x.shape[-1], x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        turned, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned, rest], dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(4),
    forward=lambda model, x, positions: model(x, positions),
    domain={"num_heads": (1, 2), "d_model": (16, 32)},
    declares={"rotary_dim": 4, "base": 10000.0, "layout": "halves"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randn(1, 2, 5, 8), torch.arange(5)).shape)
