"""What rounding may do: the unit of a dtype, bounds on sums, and the largest error that can be rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

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


HALVES = ("bfloat16", "float16")
"""The dtypes of 16 bits, by name."""


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype in a word.

    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


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
