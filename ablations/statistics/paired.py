"""Exact tests of paired seeds, and Holm. Seeds are the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from veriformer.ablations.statistics.intervals import Interval, mean_interval, vector

ALPHA = 0.05
"""Level of a whole family of tests."""

FLIPS = 99_999
"""Random sign flips where there are too many to count."""

EXACT_SEEDS = 32
"""Up to here all 2^n sign flips are counted: 65,536 sums of either half, put together by their order."""

ROUNDING = 1e-12
"""Share of the largest sum by which two sums that are equal may differ; sums of 32 float64 differ by 32 * 1.1e-16."""


def interquartile_mean(values: ArrayLike) -> float:
    """Return the mean of the middle half (Agarwal et al. 2021, section 4.3).

    >>> interquartile_mean([0.0, 1.0, 2.0, 100.0])
    1.5
    """
    return float(stats.trim_mean(vector(values), 0.25))


def sign_flip_p(differences: ArrayLike) -> float:
    """Return the two-sided p of the mean of paired differences under flips of their signs; exact up to 32 that differ.

    If the change did nothing, each difference would be as likely as its negative. The smallest p is 2 / 2^n. Of
    indicators (a seed is dead or not) it is McNemar's exact test: a seed's data and, where shapes agree, its initial
    weights are the same in base and variant, so that the seeds in which both die or neither tell nothing.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    sample = vector(differences)
    moved = sample[sample != 0]  # to flip a zero changes nothing
    n = len(moved)
    if n == 0:
        return 1.0
    if n > EXACT_SEEDS:
        found = stats.permutation_test(
            (sample,), np.mean, permutation_type="samples", n_resamples=FLIPS, rng=np.random.default_rng(0)
        )
        return float(found.pvalue)
    wanted = abs(float(moved.sum())) - ROUNDING * float(np.abs(moved).sum())
    if wanted <= 0:
        return 1.0
    left, right = _signed_sums(moved[: n // 2]), np.sort(_signed_sums(moved[n // 2 :]))
    as_large = int((len(right) - np.searchsorted(right, wanted - left)).sum())
    return min(1.0, 2 * as_large / 2**n)  # the sums lie symmetrically about zero


def _signed_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums under all 2^n choices of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def smallest_p(seeds: int) -> float:
    """Return the smallest p that `sign_flip_p` can give.

    >>> smallest_p(5)
    0.0625
    """
    return 2.0 / 2**seeds if seeds <= EXACT_SEEDS else 2.0 / (FLIPS + 1)


def holm(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """Return p-values adjusted for the number of tests (Holm 1979): the family-wise error stays at its level.

    Args:
        p_values: of the tests that were made.
        tests: in the family, where more belong to it; those that were not made count as if they had shown nothing,
            which can only raise the others' p.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    >>> holm([0.01], tests=3)
    [0.03]
    """
    family = len(p_values) if tests is None else tests
    if family < len(p_values):
        raise ValueError(f"tests was {family}, and there are {len(p_values)} p-values; a family holds all of its tests")
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (family - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def probability_of_improvement(base: ArrayLike, variant: ArrayLike) -> float:
    """Return P(base > variant) of a random seed each, ties counted half (Agarwal et al. 2021).

    >>> probability_of_improvement([1.0, 0.5], [0.5, 0.5])
    0.75
    """
    b, v = vector(base), vector(variant)
    return float(np.mean((b[:, None] > v) + 0.5 * (b[:, None] == v)))


@dataclass(frozen=True)
class Comparison:
    """Variant minus base over paired seeds.

    Attributes:
        difference: of the means, with its interval.
        p: of the exact sign-flip test.
    """

    difference: Interval
    p: float

    @staticmethod
    def of(base: ArrayLike, variant: ArrayLike, span: float | None = None) -> Comparison:
        """Compare values of the same seeds in the same order.

        Args:
            base: one a seed.
            variant: one a seed.
            span: the largest difference that is possible, where there is one.
        """
        b, v = vector(base), vector(variant)
        if len(b) != len(v):
            raise ValueError(f"base has {len(b)} seeds and variant {len(v)}; both must have the same")
        bounds = None if span is None else (-span, span)
        return Comparison(mean_interval(v - b, bounds), sign_flip_p(v - b))
