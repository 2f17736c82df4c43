"""The closed form of sinusoidal positions, what rounding may do to it, and the wrong forms that have been seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon


def closed_form(length: int, width: int, base: float, layout: str, offset: int = 0) -> Tensor:
    """Return PE `[T, D]` in float64: sin(p base^(-2i/D)) and the cosine, interleaved or in halves."""
    even = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(offset, length + offset, dtype=torch.float64)[:, None] * base ** (-even / width)
    if layout == "halves":
        return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]


def table_bound(length: int, width: int, base: float, layout: str, dtype: torch.dtype) -> Tensor:
    """Bound the rounding error of a table computed in float32 or better and stored in `dtype`, `[T, D]`.

    A frequency exp(-log(base) 2i/D) has an exponent of at most log(base), so its relative error is at most
    (log(base) + 3) u; the angle p omega inherits it, and sine and cosine move by no more than the angle. Storing
    rounds once more, by u of the dtype.
    """
    even = torch.arange(0, width, 2, dtype=torch.float64)
    omega = base ** (-even / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * omega * (math.log(base) + 3) * epsilon(torch.float32)
    angle[:, 0] = 0.0  # the first frequency is exactly 1, and so is its angle
    both = torch.cat([angle, angle], -1) if layout == "halves" else torch.stack([angle, angle], -1).flatten(1)
    return both[:, :width] + 2 * epsilon(torch.float32) + epsilon(dtype)
