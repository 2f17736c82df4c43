"""Statistics of paired seeds: intervals, an exact test, Holm, what could have been seen. Seeds are the sample."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

ALPHA, POWER = 0.05, 0.8
"""Level of a whole family of tests, and the power at which an effect counts as one that the seeds could have seen."""

RESAMPLES = 9999
"""Of a bootstrap: the end of an interval moves by about 1 % of its width from run to run."""

FLIPS = 99_999
"""Random sign flips where there are too many to go through them all."""

EXACT_SEEDS = 16
"""Up to here all 2^n sign flips are gone through, 65,536 of them; beyond, `FLIPS` random ones."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def _vector(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all():
        raise ValueError(f"values were {array.tolist()}; one or more finite numbers, one a seed, are required")
    return array


def mean_interval(values: ArrayLike) -> Interval:
    """Return the mean and its 95 % BCa bootstrap interval (Efron 1987).

    A constant sample has no spread to resample; its interval is the point, as the percentile bootstrap says too.
    With one seed nothing is known of the spread: the interval is infinite.

    >>> mean_interval([1.0, 1.0, 1.0])
    Interval(value=1.0, low=1.0, high=1.0)
    """
    sample = _vector(values)
    mean = float(sample.mean())
    if len(sample) == 1:
        return Interval(mean, -math.inf, math.inf)
    if np.ptp(sample) == 0:
        return Interval(mean, mean, mean)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a degenerate jackknife gives NaN, handled below
        ends = stats.bootstrap(
            (sample,), np.mean, n_resamples=RESAMPLES, method="BCa", rng=np.random.default_rng(0)
        ).confidence_interval
        if not (math.isfinite(ends.low) and math.isfinite(ends.high)):
            ends = stats.bootstrap(
                (sample,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
            ).confidence_interval
    return Interval(mean, float(ends.low), float(ends.high))


def interquartile_mean(values: ArrayLike) -> float:
    """Return the mean of the middle half (Agarwal et al. 2021, section 4.3).

    >>> interquartile_mean([0.0, 1.0, 2.0, 100.0])
    1.5
    """
    return float(stats.trim_mean(_vector(values), 0.25))


def sign_flip_p(differences: ArrayLike) -> float:
    """Return the two-sided p of the mean of paired differences under flips of their signs; exact up to 16 pairs.

    If the change did nothing, each difference would be as likely as its negative. The smallest p is 2 / 2^n.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    sample = _vector(differences)
    if np.all(sample == 0):
        return 1.0
    resamples = 2 ** len(sample) if len(sample) <= EXACT_SEEDS else FLIPS
    found = stats.permutation_test(
        (sample,), np.mean, permutation_type="samples", n_resamples=resamples, rng=np.random.default_rng(0)
    )
    return float(found.pvalue)


def smallest_p(seeds: int) -> float:
    """Return the smallest p that `sign_flip_p` can give.

    >>> smallest_p(5)
    0.0625
    """
    return 2.0 / 2**seeds if seeds <= EXACT_SEEDS else 2.0 / (FLIPS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979): the family-wise error stays at its level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def probability_of_improvement(base: ArrayLike, variant: ArrayLike) -> float:
    """Return P(base > variant) of a random seed each, ties counted half (Agarwal et al. 2021).

    >>> probability_of_improvement([1.0, 0.5], [0.5, 0.5])
    0.75
    """
    b, v = _vector(base), _vector(variant)
    return float(np.mean((b[:, None] > v) + 0.5 * (b[:, None] == v)))


def smallest_detectable(differences: ArrayLike, tests: int = 1, resolution: float = 0.0) -> float:
    """Return the mean difference that a paired t-test on as many seeds would find with 80 % power.

    Args:
        differences: paired; their spread is taken as the true one.
        tests: in the family; the level is divided by their number.
        resolution: the smallest difference that one seed can show.
    """
    sample = _vector(differences)
    n = len(sample)
    if n < 2:
        return math.inf
    spread = max(float(sample.std(ddof=1)), resolution)
    critical = stats.t.ppf(1 - ALPHA / tests / 2, n - 1)

    def missing(effect: float) -> float:
        return float(stats.nct.sf(critical, n - 1, effect * math.sqrt(n))) - POWER

    high = 1.0
    while missing(high) < 0:
        high *= 2
    return spread * float(optimize.brentq(missing, 0.0, high))


def wilson(successes: int, trials: int) -> Interval:
    """Return a share and its 95 % interval (Wilson 1927)."""
    ends = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return Interval(successes / trials, float(ends.low), float(ends.high))


def fisher_p(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Return Fisher's exact two-sided p for (successes, trials) of two groups."""
    table = [[k, n - k] for k, n in (first, second)]
    return float(stats.fisher_exact(table).pvalue)


@dataclass(frozen=True)
class Comparison:
    """Variant minus base over paired seeds."""

    difference: Interval
    p: float

    @staticmethod
    def of(base: ArrayLike, variant: ArrayLike) -> Comparison:
        """Compare values of the same seeds in the same order."""
        b, v = _vector(base), _vector(variant)
        if len(b) != len(v):
            raise ValueError(f"base has {len(b)} seeds and variant {len(v)}; both must have the same")
        return Comparison(mean_interval(v - b), sign_flip_p(v - b))
