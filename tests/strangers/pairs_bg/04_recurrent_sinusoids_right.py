"""Sinusoidal positions by the angle addition theorems: one rotation a step, the carry of a scan."""

import torch
from torch import nn

from veriformer.properties import Subject


class ScannedSinusoids(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim = dim
        half = (dim + 1) // 2
        omega = base ** (-2 * torch.arange(half, dtype=torch.float64) / dim)
        self.step_sin, self.step_cos = omega.sin(), omega.cos()

    def step(self, carry):
        sin, cos = carry
        sin, cos = sin * self.step_cos + cos * self.step_sin, cos * self.step_cos - sin * self.step_sin
        return sin, cos

    def forward(self, length):
        carry = (torch.zeros_like(self.step_sin), torch.ones_like(self.step_cos))
        rows = []
        for _ in range(length):
            rows.append(torch.stack(carry, dim=-1).flatten())  # sin, cos, sin, cos, ...
            carry = self.step(carry)
        return torch.stack(rows)[:, : self.dim].float()


subject = Subject(
    kind="positions",
    name="scanned sinusoids",
    build=lambda c: ScannedSinusoids(c.d_model),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)
