"""Comparing what was got with what the property requires: derived bounds, honest failures, never vacuous."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class Worst:
    """Where two tensors differ most. The place and the values there are looked up when they are asked for.

    Attributes:
        error: largest error; infinite where one side is not finite and the other is not the same.
    """

    def __init__(self, error: Tensor, got: Tensor, expected: Tensor) -> None:
        entries = error.numpy()
        self._flat = int(entries.argmax())  # a tenth of what torch's takes; of NaN the first is the largest
        self._shape = error.shape
        self._got, self._expected = got, expected
        self.error = float(entries.item(self._flat))

    @property
    def index(self) -> tuple[int, ...]:
        """Index of the largest error."""
        if not self._shape:
            return ()
        return tuple(int(i) for i in np.unravel_index(self._flat, tuple(self._shape)))  # torch's imports half of torch

    @property
    def got(self) -> float:
        """Value of the first tensor there."""
        return _number(self._got[self.index])

    @property
    def expected(self) -> float:
        """Value of the second tensor there."""
        return _number(self._expected[self.index])


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
    error = (left - right).abs_() if not left.is_complex() else (left - right).abs()
    error = error.div_(divisor)
    worst = Worst(error, left, right)
    if math.isfinite(worst.error):  # so is every entry: none needs a second look
        return worst
    error = torch.where(left == right, torch.zeros((), dtype=torch.float64), error)
    error = torch.where(error.isnan(), torch.full((), math.inf, dtype=torch.float64), error)
    return Worst(error, left, right)


def _number(value: Tensor) -> float:
    return float(value.abs()) if value.is_complex() else float(value)


def size_of(value: Tensor) -> float:
    """Return the root mean square of the finite entries, in float64; 1 if there is none or all are 0."""
    flat = value.detach().to("cpu", torch.float64).reshape(-1)
    if not math.isfinite(size := float(flat.dot(flat)) / max(flat.numel(), 1)):
        finite = flat[flat.isfinite()]
        size = float(finite.square().mean()) if finite.numel() else 0.0
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
    begins = value.detach()[(0,) * (value.ndim - 1)][:2].tolist()
    return begins[0] == begins[-1] and bool((value == value.flatten()[0]).all())


def non_finite(value: Tensor) -> str:
    """Say how many entries are not finite.

    >>> non_finite(torch.tensor([1.0, float("nan")]))
    '1 of 2 entries are NaN or infinite'
    """
    bad = int((~value.isfinite()).sum())
    return f"{bad} of {value.numel()} entries are NaN or infinite"
