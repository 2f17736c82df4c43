"""Comparing what was got with what the property requires: derived bounds, honest failures, never vacuous."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[Any]

_ALONE = 8192
"""Numbers whose product a library of linear algebra sums without threads of its own."""


class Worst:
    """Where two tensors differ most. The place and the values there are looked up when they are asked for.

    Attributes:
        error: largest error; infinite where one side is not finite and the other is not the same.
    """

    def __init__(self, error: Numbers, got: Numbers, expected: Numbers) -> None:
        self._flat = int(error.argmax())  # of NaN the first is the largest
        self._shape = error.shape
        self._got, self._expected = got, expected
        self.error = float(error.item(self._flat))

    @property
    def index(self) -> tuple[int, ...]:
        """Index of the largest error."""
        return tuple(int(i) for i in np.unravel_index(self._flat, self._shape))

    @property
    def got(self) -> float:
        """Value of the first tensor there."""
        return _number(self._got.item(self._flat))

    @property
    def expected(self) -> float:
        """Value of the second tensor there."""
        return _number(self._expected.item(self._flat))


def worst_difference(got: Tensor, expected: Tensor, unit: Tensor | float = 1.0) -> Worst:
    """Find the largest |got - expected| / unit. Equal infinities agree; NaN agrees with nothing.

    In NumPy, whose operations on a few numbers take a third of the time.

    Args:
        got: any shape.
        expected: same shape.
        unit: positive, broadcastable to that shape: the size of one unit of error.
    """
    left, right = _wide(got), _wide(expected)
    divisor = _wide(unit) if isinstance(unit, Tensor) else unit
    with np.errstate(all="ignore"):
        error = np.asarray(np.abs(left - right) / divisor)
    worst = Worst(error, left, right)
    if math.isfinite(worst.error):  # so is every entry: none needs a second look
        return worst
    error = np.where(left == right, 0.0, error)
    return Worst(np.where(np.isnan(error), math.inf, error), left, right)


def _wide(value: Tensor) -> Numbers:
    """Return the entries in float64, or complex128."""
    value = value.detach()
    if value.dtype == torch.float32 and value.is_cpu:
        return np.asarray(value.numpy().astype(np.float64))
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.to("cpu", wide).resolve_conj().resolve_neg().numpy()


def _number(value: complex) -> float:
    return abs(value) if isinstance(value, complex) else float(value)


def size_of(value: Tensor) -> float:
    """Return the root mean square of the finite entries, in float64; 1 if there is none or all are 0."""
    wide = _wide(value).reshape(-1)
    with np.errstate(all="ignore"):
        total = np.vdot(wide, wide).real if wide.size <= _ALONE else (wide * wide.conj()).real.sum()
    size = float(total) / max(wide.size, 1)
    if not math.isfinite(size):
        with np.errstate(all="ignore"):
            finite = np.abs(wide[np.isfinite(wide)])
            size = float((finite * finite).mean()) if finite.size else 0.0
    return math.sqrt(size) or 1.0


def why_vacuous(got: Tensor, expected: Tensor, *, constants_allowed: bool = False) -> str:
    """Return why a comparison of two tensors of one shape cannot fail, in words; "" if it can."""
    if got.numel() == 0:
        return f"nothing to compare (shape {list(got.shape)})"
    if got.data_ptr() == expected.data_ptr() and got.data_ptr() != 0 and got.stride() == expected.stride():
        return "a tensor is compared with itself"
    if constants_allowed or got.numel() < 3 or not (_is_constant(got) and _is_constant(expected)):
        return ""
    return "both sides are the same constant everywhere, which no fault would disturb"


def _is_constant(value: Tensor) -> bool:
    """Whether all entries are the same; the first two of a row spare most tensors a look at every other one."""
    row = value.detach().reshape(-1) if value.is_contiguous() else value.detach()[(0,) * (value.ndim - 1)]
    begins = row[:2].tolist()
    return begins[0] == begins[-1] and bool((value == value.flatten()[0]).all())


def non_finite(value: Tensor) -> str:
    """Say how many entries are not finite.

    >>> non_finite(torch.tensor([1.0, float("nan")]))
    '1 of 2 entries are NaN or infinite'
    """
    bad = int((~value.isfinite()).sum())
    return f"{bad} of {value.numel()} entries are NaN or infinite"
