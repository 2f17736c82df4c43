"""What the seeds could have seen: the tests themselves, simulated on seeds like those that were observed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from veriformer.ablations.statistics.paired import sign_flip_p, smallest_p

POWER = 0.8
"""Power at which an effect counts as one that the seeds could have seen."""

SIMULATED = 200
"""Runs for each effect that is tried: a power of 0.8 is known to 0.028."""

SHARES, SHIFTS = 50, 1000
"""Shares of dead seeds, and shifts from none to all that a living seed can lose, that are told apart."""


@dataclass(frozen=True)
class Detectable:
    """Smallest effects that the tests find with 80 % power; None: not even the largest.

    Attributes:
        dead_share: share of the variant's seeds that die, where as many of the base's die as were seen to.
        fall: of the mean, that this share means.
        shift: of every seed alike.
    """

    dead_share: float | None
    fall: float | None
    shift: float | None


@functools.lru_cache(maxsize=512)
def smallest_detectable(
    alive: tuple[float, ...], base_dead: float, seeds: int, fall: float, level: float
) -> Detectable:
    """Return the smallest effects that sign flips of the values, or of who is dead, would find at `level`.

    A simulated seed is dead in base or variant with the shares that are tried; one that lives in both differs by a
    number drawn from `alive`, less their mean. The same random numbers serve every effect.

    Args:
        alive: differences of the seeds that live in base and variant.
        base_dead: share of the base's seeds that are dead.
        seeds: in a sample.
        fall: from a living seed to a dead one.
        level: of one test, corrected for the family.
    """
    if smallest_p(seeds) > level or fall <= 0:
        return Detectable(None, None, None)
    rng = np.random.default_rng(0)
    size = (SIMULATED, seeds)
    pool = np.asarray(alive or (0.0,))
    noise = rng.choice(pool - pool.mean(), size)
    base_dies, lot = rng.random(size) < base_dead, rng.random(size)

    def power(share: float, shift: float) -> float:
        dies = lot < share
        values = np.where(base_dies, fall * ~dies, np.where(dies, -fall, noise - shift))
        deaths = dies.astype(np.float64) - base_dies
        seen = [sign_flip_p(v) <= level or sign_flip_p(d) <= level for v, d in zip(values, deaths, strict=True)]
        return sum(seen) / SIMULATED

    least = _least(lambda step: power(step / SHARES, 0.0), math.floor(base_dead * SHARES), SHARES)
    moved = _least(lambda step: power(base_dead, fall * step / SHIFTS), 0, SHIFTS)
    return Detectable(
        None if least is None else least / SHARES,
        None if least is None else (least / SHARES - base_dead) * fall,
        None if moved is None else moved / SHIFTS * fall,
    )


def _least(power: Callable[[int], float], low: int, high: int) -> int | None:
    """Return the least step with enough power, by halving; power grows with the effect."""
    if power(high) < POWER:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high
