"""How often a verdict repeats when the seeds are drawn again: what is published should hold on other seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from veriformer.ablations.statistics.paired import ALPHA

REDRAWN = 2000
"""Times that the seeds are drawn again: a share of 95 % is known to half a percent."""

BAND = 0.01
"""Difference of accuracy inside which two variants count as equivalent, as in `veriformer.ablations.verdicts.rows`."""


def repeats(base: ArrayLike, variant: ArrayLike, share_of_level: float = 1.0, alike: Sequence[ArrayLike] = ()) -> float:
    """Return the share of redrawn runs whose verdict is the one of the seeds as they are.

    As many pairs of seeds are drawn with replacement, and a quick form of the verdict is taken of each draw: the normal
    form of the sign-flip test, sum(d) / sqrt(sum(d^2)), and the mean with 1.96 standard errors. A kind of seed that is
    one in twenty is in none of twelve, and could never be drawn: of a row most of whose seeds are as the base's, every
    second one is drawn from other such rows of the same task and depth, whose evidence weighs as much as the row's own.
    Rows that hurt or help are no such rows (see `shows_nothing`).

    Args:
        base: one number a seed.
        variant: of the same seeds.
        share_of_level: part of the family's level that this test has, by Holm.
        alike: differences, one a seed, of other variants on the same task at the same depth that show nothing either.

    >>> repeats([1.0] * 8, [0.5] * 8)
    1.0
    >>> repeats([1.0] * 12, [1.0] * 12, alike=[[0.0] * 11 + [-0.5]]) < 0.95
    True
    """
    differences = np.asarray(variant, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    rng = np.random.default_rng(0)
    drawn = differences[rng.integers(len(differences), size=(REDRAWN, len(differences)))]
    others = [d for other in alike if _is_mostly_none(d := np.asarray(other, dtype=np.float64))]
    if others and _is_mostly_none(differences):
        pool = np.concatenate(others)
        is_other = rng.random(drawn.shape) < 0.5
        drawn = np.where(is_other, pool[rng.integers(len(pool), size=drawn.shape)], drawn)
    critical = float(stats.norm.isf(ALPHA * min(1.0, share_of_level) / 2))
    return float(np.mean(_verdicts(drawn, critical) == _verdicts(differences[None], critical)))


def shows_nothing(verdict: str) -> bool:
    """Whether a verdict names no difference of accuracy: one seed of another kind is what could turn it."""
    return not verdict.startswith(("hurts", "helps"))


def _is_mostly_none(differences: NDArray[np.float64]) -> bool:
    return bool(len(differences)) and bool(np.median(np.abs(differences)) <= BAND)


def _verdicts(differences: NDArray[np.float64], critical: float) -> NDArray[np.int64]:
    """Return 2 for equivalent, 1 helps, -1 hurts, 0 none of these, one for each row of differences `[draws, seeds]`."""
    seeds = differences.shape[1]
    mean = differences.mean(axis=1)
    error = differences.std(axis=1, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.full_like(mean, np.inf)
    length = np.sqrt((differences**2).sum(axis=1))
    z = np.divide(differences.sum(axis=1), length, out=np.zeros_like(length), where=length > 0)
    found = np.where(np.abs(z) > critical, np.sign(z), 0).astype(np.int64)
    return np.where(np.abs(mean) + 1.96 * error <= BAND, 2, found)
