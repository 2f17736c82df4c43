"""Rotary positions from a table of cosines and sines that grows when a longer sequence comes."""
import torch
from torch import nn

from veriformer.properties import Subject


class GrowingRope(nn.Module):
    def __init__(self, base=10000.0, start=16):
        super().__init__()
        self.base, self.start, self.tables = base, start, {}

    def rows(self, first, count, width):
        """Angles of `count` positions from `first` on."""
        rate = self.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = (first + torch.arange(count, dtype=torch.float64))[:, None] * rate
        return torch.stack((angle.cos(), angle.sin()))

    def table(self, needed, width):
        table = self.tables.get(width)
        if table is None:
            table = self.rows(0, self.start, width)
        while table.shape[1] < needed:
            have = table.shape[1]
            table = torch.cat((table, self.rows(0, have, width)), dim=1)  # twice as long
        self.tables[width] = table
        return table

    def forward(self, x, positions):
        width = x.shape[-1]
        if width % 2:
            raise ValueError("an even width is needed")
        positions = positions.long().cpu()
        if bool((positions < 0).any()):
            raise ValueError("positions begin at 0")
        table = self.table(int(positions.max()) + 1, width)[:, positions]
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        cos, sin = table.to(device=x.device, dtype=wide)
        one, two = x.to(wide).chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1).to(x.dtype)


subject = Subject(
    kind="rotary",
    name="rotary, growing table",
    build=lambda c: GrowingRope(),
    forward=lambda model, x, positions: model(x, positions),
    declares={"layout": "halves", "base": 10000},
)

WHAT = (
    'Line 25: '
    'What is appended to the table begins at position 0 again instead of at the end of the table: position 16 is rotated as position 0.'
)
