"""Rotary positions from a table that grows when a longer sequence comes."""
import torch
from torch import nn

from veriformer.properties import Subject


class GrowingRotary(nn.Module):
    def __init__(self, dim, base=10000.0, start=8):
        super().__init__()
        if dim % 2:
            raise ValueError("dim must be even")
        self.dim, self.base = dim, base
        self.table = self.rows(torch.arange(start))

    def rows(self, positions):
        """cos and sin [n, 2, dim / 2] of n positions, in double precision."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim
        angle = positions.double()[:, None] / self.base**exponent
        return torch.stack([angle.cos(), angle.sin()], dim=1)

    def reserve(self, length):
        have = self.table.shape[0]
        if length > have:
            want = max(length, 2 * have)
            self.table = torch.cat([self.table, self.rows(torch.arange(have, want))])

    def forward(self, x, positions):
        positions = positions.long()
        if positions.min() < 0:
            raise ValueError("positions start at 0")
        self.reserve(int(positions.max()) + 1)
        cos, sin = self.table.to(x.device)[positions].to(x.dtype).unbind(1)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


subject = Subject(
    kind="rotary",
    name="rotary, growing table",
    build=lambda c: GrowingRotary(c.d_head),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000},
)
