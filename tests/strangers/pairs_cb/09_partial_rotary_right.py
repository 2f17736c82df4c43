"""Partial rotary embedding as GPT-NeoX has it: the first channels turn, the rest pass."""
import torch

from veriformer.properties import Subject

ROTARY = 4


class PartialRotary(torch.nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base
        self._tables = {}

    def table(self, width, positions):
        key = width
        inv = self._tables.get(key)
        if inv is None:
            inv = self.base ** -(torch.arange(0, ROTARY, 2, dtype=torch.float64) / ROTARY)
            self._tables[key] = inv
        angles = torch.outer(positions.double(), inv)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, x, positions):
        if x.shape[-1] < ROTARY:
            raise ValueError("a head has fewer channels than are rotated")
        turn = self.table(x.shape[-1], positions)
        a, b = x[..., : ROTARY // 2], x[..., ROTARY // 2 : ROTARY]
        cos, sin = turn.real.to(x.dtype), turn.imag.to(x.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., ROTARY:]), -1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"rotary_dim": ROTARY, "layout": "halves", "base": 10000.0},
)
