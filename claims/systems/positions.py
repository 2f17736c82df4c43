"""Position encodings that the notes call poor choices, to stand beside the sinusoids (chapter 10, section 4.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def scalar(length: int, width: int) -> Tensor:
    """Return p / length in every channel: `[length, width]` float64; neighbours are 1 / length apart in each."""
    return (torch.arange(length, dtype=torch.float64) / length)[:, None].expand(-1, width)


def one_hot(length: int) -> Tensor:
    """Return the unit vectors, `[length, length]` float64: as wide as the sequence is long, none nearer than others."""
    return torch.eye(length, dtype=torch.float64)


def resolution(table: Tensor) -> float:
    """Return the least distance of neighbours over the largest norm of a row: what a token's vector must not drown."""
    return ((table[1:] - table[:-1]).norm(dim=1).min() / table.norm(dim=1).max()).item()
