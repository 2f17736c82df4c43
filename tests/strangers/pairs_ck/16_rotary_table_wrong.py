"""Rotary embedding from a table that grows on demand; pairs are neighbours (GPT-J)."""
import torch
from torch import nn

from veriformer.properties import Subject


class RotaryTable(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base, self.tables = base, {}

    def table(self, rows, width):
        have = self.tables.get(width)
        if have is None or len(have) < rows:
            inverse = self.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angle = torch.outer(torch.arange(2 * rows, dtype=torch.float64), inverse)
            have = self.tables[width] = torch.polar(torch.ones_like(angle), angle)
        return have

    def forward(self, x, positions):
        if x.shape[-1] % 2 or (positions < 0).any():
            raise ValueError("even widths and positions from 0 on")
        turn = self.table(int(positions.max()) + 1, x.shape[-1]).to(x.device)
        turn = turn[: positions.numel()]
        cos, sin = turn.real.to(x.dtype), turn.imag.to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


subject = Subject(
    kind="rotary",
    build=lambda c: RotaryTable(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "interleaved"},
)

WHAT = 'Line 25: the table is cut to the number of positions instead of being read at them: right for 0, 1, 2, ... alone, not for a later chunk, gaps or another order.'
