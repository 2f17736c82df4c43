"""Comparing what was got with what the property requires: derived bounds, honest failures, never vacuous."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.properties.violations import VacuousCheckError

GAP: Mapping[torch.dtype, float] = {
    # Surveyed over 170 released models with re-drawn weights: benign float32 noise stayed below 3e-5 of the
    # output's size, real deviations started at 1e-4. The cap is the geometric middle of that gap. float64 stays far
    # below float32 noise; in half precision the gap is not there, and the cap only keeps a comparison meaningful (right
    # models reach 0.39 under bfloat16 autocast: query-key norm, gated delta rule).
    torch.float32: 5.5e-5,
    torch.float64: 1e-9,
    torch.bfloat16: 0.5,
    torch.float16: 0.05,
}
"""Largest relative error that can ever count as rounding, by dtype."""


def epsilon(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number of `dtype`.

    >>> epsilon(torch.float32) == 2.0 ** -23
    True
    """
    return float(torch.finfo(dtype).eps)


def rounding_bound(dtype: torch.dtype, length: int, *, operations: int = 1) -> float:
    """Bound the relative rounding error of `operations` successive reductions over `length` terms.

    A sum of n rounded terms errs by at most gamma_n = n u / (1 - n u) (Higham 2002, 3.1), and by at most
    lambda sqrt(n) u with probability 1 - 2 exp(-lambda^2 / 2) (Higham & Mary 2019, theorem 2.4); lambda = 6
    leaves 3e-8.
    The smaller of the two counts. Each reduction is preceded and followed by a few roundings of its own (4 u).

    Args:
        dtype: of the arithmetic.
        length: longest reduction, >= 1.
        operations: how many reductions follow one another.

    Returns:
        Relative error, at least 5 u per operation.
    """
    unit = epsilon(dtype) / 2
    worst = length * unit / (1 - length * unit) if length * unit < 1 else math.inf
    return operations * (min(worst, 6 * math.sqrt(length) * unit) + 4 * unit)


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


def refuse_vacuous(got: Tensor, expected: Tensor, what: str, *, constants_allowed: bool) -> None:
    """Raise if the comparison cannot fail.

    Raises:
        VacuousCheckError: no elements, shared storage, or constants on both sides.
    """
    if got.numel() == 0:
        raise VacuousCheckError(f"{what}: nothing to compare (shape {list(got.shape)})")
    if got.data_ptr() == expected.data_ptr() and got.data_ptr() != 0 and got.stride() == expected.stride():
        raise VacuousCheckError(f"{what}: a tensor is compared with itself")
    if constants_allowed or got.numel() < 3:
        return
    if bool((got == got.flatten()[0]).all()) and bool((expected == expected.flatten()[0]).all()):
        raise VacuousCheckError(f"{what}: both sides are the same constant everywhere, which no fault would disturb")


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
