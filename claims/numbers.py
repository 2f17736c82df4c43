"""Small measurements that several claims share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """Return a generator of its own for every random choice of a claim."""
    return torch.Generator().manual_seed(seed)


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    """Return independent standard normal numbers in float64."""
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; NaN if either holds one."""
    return (one.double() - other.double()).abs().max().item()


def slope(sizes: list[float], values: list[float]) -> float:
    """Return the exponent e of the least-squares fit value ~ size^e."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (sizes, values))
    x = x - x.mean()
    return ((x * (y - y.mean())).sum() / (x * x).sum()).item()


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of Student's t for the mean of independent values."""
    values = values.double().flatten()
    half = stats.t.ppf(0.975, values.numel() - 1) * values.std() / values.numel() ** 0.5
    return (values.mean() - half).item(), (values.mean() + half).item()


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    """Return whether the call ends in this error."""
    try:
        call()
    except error:
        return True
    return False
