"""Absolute positions, added to token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sinusoidal(positions: Tensor, d_model: int, base: float = 10000.0) -> Tensor:
    """Return PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D)), computed in float64.

    Args:
        positions: any shape, integers or floats.
        d_model: D; if odd, the last channel is the sine without its cosine.
        base: of the wavelengths, which run from 2 pi to 2 pi base^((D-2)/D).

    Returns:
        `[..., D]` float64.

    Source: Vaswani et al. 2017, section 3.5.

    >>> sinusoidal(torch.tensor([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[..., None] * base ** (-even / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :d_model]


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions at any length; no parameters and no table."""

    def __init__(self, d_model: int, base: float = 10000.0) -> None:
        super().__init__()
        self.d_model, self.base = d_model, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the encoding of `positions` `[B, T]` to `x` `[B, T, D]`."""
        return x + sinusoidal(positions, self.d_model, self.base).to(x.dtype)


class LearnedPositions(nn.Module):
    """One trained vector a position, `max_len` of them (Gehring et al. 2017)."""

    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, d_model)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add row `positions` `[B, T]` of the table to `x` `[B, T, D]`.

        Raises:
            ValueError: a position lies beyond the table.
        """
        max_len = self.table.num_embeddings
        if x.shape[1] > max_len or bool((positions >= max_len).any()):
            raise ValueError(
                f"the sequence reaches position {int(positions.max())}, the learned table ends at {max_len - 1}; "
                "build the model with a larger max_len"
            )
        return x + self.table(positions)


class NoPositions(nn.Module):
    """Order is left out, or enters inside attention."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x`."""
        return x
