"""How often a verdict repeats when the seeds are drawn again: what is published should hold on other seeds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from veriformer.ablations.statistics.paired import ALPHA

REDRAWN = 2000
"""Times that the seeds are drawn again: a share of 95 % is known to half a percent."""

BAND = 0.01
"""Difference of accuracy inside which two variants count as equivalent, as in `veriformer.ablations.verdicts.rows`."""


def repeats(base: ArrayLike, variant: ArrayLike, share_of_level: float = 1.0) -> float:
    """Return the share of redrawn runs whose verdict is the one of the seeds as they are.

    As many pairs of seeds are drawn with replacement, and a quick form of the verdict is taken of each draw: the normal
    form of the sign-flip test, sum(d) / sqrt(sum(d^2)), and the mean with 1.96 standard errors. Deaths that no seed has
    shown yet cannot be drawn, so the share is an upper bound where none died.

    Args:
        base: one number a seed.
        variant: of the same seeds.
        share_of_level: part of the family's level that this test has, by Holm.

    >>> repeats([1.0] * 8, [0.5] * 8)
    1.0
    """
    differences = np.asarray(variant, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    rng = np.random.default_rng(0)
    drawn = differences[rng.integers(len(differences), size=(REDRAWN, len(differences)))]
    critical = float(stats.norm.isf(ALPHA * min(1.0, share_of_level) / 2))
    return float(np.mean(_verdicts(drawn, critical) == _verdicts(differences[None], critical)))


def _verdicts(differences: NDArray[np.float64], critical: float) -> NDArray[np.int64]:
    """Return 2 for equivalent, 1 helps, -1 hurts, 0 none of these, one for each row of differences `[draws, seeds]`."""
    seeds = differences.shape[1]
    mean = differences.mean(axis=1)
    error = differences.std(axis=1, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.full_like(mean, np.inf)
    length = np.sqrt((differences**2).sum(axis=1))
    z = np.divide(differences.sum(axis=1), length, out=np.zeros_like(length), where=length > 0)
    found = np.where(np.abs(z) > critical, np.sign(z), 0).astype(np.int64)
    return np.where(np.abs(mean) + 1.96 * error <= BAND, 2, found)
