"""Rotary positions: queries and keys are turned by an angle proportional to their position."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turn the channel pair (2i, 2i+1) at position p by the angle p * base^(-2i/K).

    <R_p q, R_s k> then depends on p - s alone. Angles are computed in float64 whatever the dtype of the model:
    at position 100 000 a bfloat16 angle would be wrong by hundreds of turns.

    Source: Su et al. 2021, section 3.2.2.
    """

    def __init__(self, d_head: int, base: float = 10000.0) -> None:
        super().__init__()
        if d_head % 2:
            raise ValueError(f"d_head was {d_head}; rotary positions turn pairs of channels, give an even number")
        self.d_head, self.base = d_head, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` `[B, H, T, K]` to `positions` `[B, T]` or `[T]`."""
        even = torch.arange(0, self.d_head, 2, dtype=torch.float64, device=x.device)
        angles = positions.to(torch.float64)[..., None] * self.base ** (-even / self.d_head)
        if positions.ndim == 2:
            angles = angles[:, None]  # the same angle for every head
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


class NoRotation(nn.Module):
    """Queries and keys stay as they are."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x`."""
        return x
