"""Sinusoidal positions whose table grows when somebody asks for more."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "When the table grows, the new rows are numbered from zero again instead of going on behind the rows that are there."
CAUSE = (
    "The rows appended on growth are computed for positions arange(need - have) rather than arange(have, need): from the "
    "first growth on (8 rows at the start) the encoding repeats itself from position 0, and positions coincide."
)

FIRST = 8


class SinusoidalPositions(nn.Module):
    """`p / 10000^(2i/d)`: sines at even channels, cosines at odd ones."""

    def __init__(self, d_model: int, base: float = 10000.0):
        super().__init__()
        self.d_model, self.base = d_model, base
        self.register_buffer("table", self.rows(torch.arange(FIRST)), persistent=False)

    def rows(self, positions):
        channels = torch.arange(0, self.d_model, 2, dtype=torch.float64, device=positions.device)
        angles = positions.to(torch.float64)[:, None] * self.base ** (-channels / self.d_model)
        both = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        return both[:, : self.d_model].to(torch.get_default_dtype())  # an odd width ends with a sine

    def new_positions(self, have: int, need: int):
        return torch.arange(have, need, device=self.table.device)

    def grow(self, length: int):
        have = self.table.shape[0]
        need = max(length, 2 * have)
        with torch.inference_mode(False), torch.no_grad():
            new = self.rows(self.new_positions(have, need)).to(self.table.dtype)
            self.table = torch.cat([self.table, new])

    def forward(self, length: int):
        if length > self.table.shape[0]:
            self.grow(length)
        return self.table[:length].clone()


class SinusoidalPositionsLazily(SinusoidalPositions):
    def new_positions(self, have: int, need: int):
        return torch.arange(need - have, device=self.table.device)


facts = {
    "positions": "sinusoidal",
    "layout": "interleaved",
    "base": 10000,
    "beyond_max_len": "works",
}

right = Subject(
    kind="positions",
    name="sinusoids that grow",
    build=lambda c: SinusoidalPositions(c.d_model),
    forward=lambda m, length: m(length),
    declares=facts,
)
wrong = Subject(
    kind="positions",
    name="sinusoids that grow lazily",
    build=lambda c: SinusoidalPositionsLazily(c.d_model),
    forward=lambda m, length: m(length),
    declares=facts,
)
