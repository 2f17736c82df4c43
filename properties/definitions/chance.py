"""Quantiles of counts and sums of squares that are due to chance: what a right subject exceeds once in so many runs.

`scipy.special` is imported where one is asked for: it takes a quarter of a second of every process, and `scipy.stats`,
which has the same quantiles, half a second more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import torch


def binomial_interval(alarm: float, count: int, share: float) -> tuple[int, int]:
    """Return the least and the most of `count` independent draws that hit, but for a chance of `alarm`.

    >>> binomial_interval(0.05, 100, 0.5)
    (40, 60)
    """
    return least_hits(alarm / 2, count, share), most_hits(alarm / 2, count, share)


def most_hits(tail: float, count: int, share: float) -> int:
    """Return the least k with P(more than k of `count` hit) <= tail, each with probability `share`.

    >>> most_hits(0.025, 100, 0.5)
    60
    """
    from scipy import special

    return _first(count, lambda k: float(special.bdtrc(k, count, share)) <= tail)


def least_hits(tail: float, count: int, share: float) -> int:
    """Return the least k with P(at most k of `count` hit) >= tail, each with probability `share`.

    >>> least_hits(0.025, 100, 0.5)
    40
    """
    from scipy import special

    return _first(count, lambda k: float(special.bdtr(k, count, share)) >= tail)


def squares_interval(tail: float, count: int) -> tuple[float, float]:
    """Return between which a sum of `count` squares of standard normal numbers lies, but for a chance of `tail` each.

    >>> [round(end, 2) for end in squares_interval(0.025, 10)]
    [3.25, 20.48]
    """
    half = torch.tensor(count / 2, dtype=torch.float64)
    beyond = count / 2 + 2 * math.sqrt(count * -math.log(tail)) - 2 * math.log(tail)  # Laurent & Massart 2000, lemma 1
    low = _crossing(lambda x: float(torch.special.gammainc(half, half.new_tensor(x))) >= tail, beyond)
    high = _crossing(lambda x: float(torch.special.gammaincc(half, half.new_tensor(x))) <= tail, beyond)
    return 2 * low, 2 * high


def _crossing(reached: Callable[[float], bool], end: float) -> float:
    """Return where between 0 and `end` a condition begins to hold, by halving: as near as float64 tells."""
    start = 0.0
    for _ in range(80):
        middle = (start + end) / 2
        start, end = (start, middle) if reached(middle) else (middle, end)
    return end


def _first(count: int, reached: Callable[[int], bool]) -> int:
    """Return the first of 0 .. count from which on a condition holds; `count` if it holds nowhere below."""
    return bisect_left(range(count), True, key=reached)
