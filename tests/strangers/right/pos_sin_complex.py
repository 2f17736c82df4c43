"""Sinusoidal positions as powers of unit complex numbers: row t is z^t, its imaginary and real parts side by side.

Unusual: no sine is taken of a large angle; z^t is built by repeated squaring of the rows already there (rows n .. 2n - 1 are rows
0 .. n - 1 times z^n), in complex128, so the rounding error stays near 1e-15.
"""

import torch
from torch import nn

from veriformer.properties import Subject


class ComplexPositions(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("like", torch.empty(0), persistent=False)  # follows .to() and .double()

    def forward(self, length: int) -> torch.Tensor:
        pairs = (self.d_model + 1) // 2
        rates = 10000.0 ** (-2.0 * torch.arange(pairs, dtype=torch.float64) / self.d_model)
        z = torch.polar(torch.ones_like(rates), rates)  # one step
        rows = torch.ones(1, pairs, dtype=torch.complex128)
        step = z
        while rows.size(0) < length:
            rows = torch.cat([rows, rows * step])
            step = step * step
        table = torch.view_as_real(rows[:length]).flip(-1).flatten(-2)  # (cos, sin) -> (sin, cos)
        return table[:, : self.d_model].to(self.like)


COMMON = dict(
    kind="positions",
    build=lambda c: ComplexPositions(c.d_model),
    forward=lambda m, length: m(length),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000.0},
)
