"""Intervals that cover at few seeds, solved or dead ones too."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95

DRAWS = 9999
"""Of the weights of a bounded interval: its ends move by about 1 % of their distance to the bound from draw to draw."""

_CHUNK = 2**22
"""Weights held at once, 32 MiB."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def within(self, margin: float) -> bool:
        """Return whether all of it is at most `margin` away from nothing."""
        return -margin <= self.low and self.high <= margin


def vector(values: ArrayLike) -> NDArray[np.float64]:
    """Return one finite number a seed as float64 `[n]`.

    Raises:
        ValueError: there is none, or one is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all():
        raise ValueError(f"values were {array.tolist()}; one or more finite numbers, one a seed, are required")
    return array


def mean_interval(values: ArrayLike, bounds: tuple[float, float] | None = None) -> Interval:
    """Return the mean and a 95 % interval of it.

    Without bounds it is Student's t, right for numbers that scatter evenly, and silent on a mishap that no seed
    has met: a constant sample gets a point. With one seed nothing is known: the interval is infinite.

    With bounds it is Gaffke's (2005): one number more, at the bound, is added to the sample, all are weighted by flat
    Dirichlet weights, and the end is a quantile of the weighted mean. Of solved-or-dead seeds it is the exact binomial
    interval, so seeds that may die but did not are in it. That it covers for every other law is a conjecture
    (Learned-Miller & Thomas 2019); `benchmarks/statistics_simulation.py` shows what it reaches here.

    Args:
        values: one a seed.
        bounds: that no value can pass.

    >>> mean_interval([1.0, 1.0, 1.0])
    Interval(value=1.0, low=1.0, high=1.0)
    >>> round(mean_interval([1.0] * 12, (0.0, 1.0)).low, 1), round(0.025 ** (1 / 12), 1)
    (0.7, 0.7)
    """
    sample = np.sort(vector(values))
    mean, n = float(sample.mean()), len(sample)
    if bounds is not None:
        low, high = bounds
        if low > sample[0] or high < sample[-1]:
            raise ValueError(
                f"values from {sample[0]:g} to {sample[-1]:g} are not within the bounds {low:g} to {high:g}"
            )
        tail = (1 - CONFIDENCE) / 2
        weighted, last = _weighted(sample)
        return Interval(
            mean, float(np.quantile(weighted + last * low, tail)), float(np.quantile(weighted + last * high, 1 - tail))
        )
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * float(sample.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def _weighted(sample: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each draw of weights, the weighted sum of the sample and the weight of the number at the bound."""
    n = len(sample)
    if DRAWS * (n + 1) <= _CHUNK:
        weights = _weights(n + 1)
        return weights[:, :n] @ sample, weights[:, n]
    rng, sums, lasts = np.random.default_rng(0), [], []
    size = max(1, _CHUNK // (n + 1))
    for start in range(0, DRAWS, size):
        weights = rng.dirichlet(np.ones(n + 1), min(size, DRAWS - start))
        sums.append(weights[:, :n] @ sample)
        lasts.append(weights[:, n])
    return np.concatenate(sums), np.concatenate(lasts)


@functools.lru_cache(maxsize=4)
def _weights(number: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).dirichlet(np.ones(number), DRAWS)


def binomial_interval(successes: int, trials: int) -> Interval:
    """Return a share and its exact 95 % interval (Clopper & Pearson 1934)."""
    ends = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="exact")
    return Interval(successes / trials, float(ends.low), float(ends.high))


def share_not_excluded(successes: int, trials: int) -> float:
    """Return the largest share that the count does not exclude at 95 %, one-sided (Clopper & Pearson 1934).

    >>> round(share_not_excluded(0, 24), 3), round(1 - 0.05 ** (1 / 24), 3)
    (0.117, 0.117)
    """
    ends = stats.binomtest(successes, trials, alternative="less").proportion_ci(CONFIDENCE, method="exact")
    return float(ends.high)
