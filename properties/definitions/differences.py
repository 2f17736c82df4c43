"""Comparing what was got with what the property requires: derived bounds, honest failures, never vacuous."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Worst:
    """Where two tensors differ most.

    Attributes:
        error: largest error; infinite where one side is not finite and the other is not the same.
        index: where.
        got: value there.
        expected: value there.
    """

    error: float
    index: tuple[int, ...]
    got: float
    expected: float


def worst_difference(got: Tensor, expected: Tensor, unit: Tensor | float = 1.0) -> Worst:
    """Find the largest |got - expected| / unit. Equal infinities agree; NaN agrees with nothing.

    Args:
        got: any shape.
        expected: same shape.
        unit: positive, broadcastable to that shape: the size of one unit of error.
    """
    wide = torch.complex128 if got.is_complex() else torch.float64
    left, right = got.detach().to("cpu", wide), expected.detach().to("cpu", wide)
    divisor = unit.detach().to("cpu", torch.float64) if isinstance(unit, Tensor) else unit
    error = (left - right).abs() / divisor
    error = torch.where(left == right, torch.zeros((), dtype=torch.float64), error)
    error = torch.where(error.isnan(), torch.full((), math.inf, dtype=torch.float64), error)
    flat = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)) if error.ndim else ()
    return Worst(float(error[index]), index, _number(left[index]), _number(right[index]))


def _number(value: Tensor) -> float:
    return float(value.abs()) if value.is_complex() else float(value)


def size_of(value: Tensor) -> float:
    """Return the root mean square of the finite entries, in float64; 1 if there is none or all are 0."""
    finite = value.detach().to("cpu", torch.float64)
    finite = finite[finite.isfinite()]
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return size or 1.0


def non_finite(value: Tensor) -> str:
    """Say how many entries are not finite.

    >>> non_finite(torch.tensor([1.0, float("nan")]))
    '1 of 2 entries are NaN or infinite'
    """
    bad = int((~value.isfinite()).sum())
    return f"{bad} of {value.numel()} entries are NaN or infinite"
