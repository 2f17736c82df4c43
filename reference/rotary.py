"""Rotary positions: queries and keys are turned by an angle proportional to their position."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turn the channel pair (2i, 2i+1) at position p by the angle p * base^(-2i/R), for the first R channels of a head.

    <R_p q, R_s k> then depends on p - s alone. Channels behind them stay as they are (partial rotary). Angles are
    computed in float64 whatever the dtype of the model: at position 100 000 a bfloat16 angle would be wrong by
    hundreds of turns.

    Source: Su et al. 2021, section 3.2.2.
    """

    def __init__(self, rotary_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if rotary_dim % 2:
            raise ValueError(
                f"rotary_dim was {rotary_dim}; rotary positions turn pairs of channels, give an even number"
            )
        self.rotary_dim, self.base = rotary_dim, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` `[B, H, T, K]` to `positions` `[B, T]` or `[T]`."""
        even = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=x.device)
        angles = positions.to(torch.float64)[..., None] * self.base ** (-even / self.rotary_dim)
        if positions.ndim == 2:
            angles = angles[:, None]  # the same angle for every head
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., 0 : self.rotary_dim : 2], x[..., 1 : self.rotary_dim : 2]
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
        return torch.cat([turned, x[..., self.rotary_dim :]], dim=-1)


class NoRotation(nn.Module):
    """Queries and keys stay as they are."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x`."""
        return x
