"""Warm-up, stable, decay (MiniCPM): linear up, a plateau at the peak, then 1 - sqrt down to the floor over the last fifth.

Unusual: for most of the run the rate does not change at all; the fall is steepest at its start. Interpolated between named phases
found by bisection.
"""

from bisect import bisect_right
from math import sqrt

from veriformer.properties import Subject

WARMUP, DECAY, TOTAL = 10, 80, 100
PEAK, FLOOR = 1e-2, 0.0


def warm(step):
    return PEAK * step / WARMUP


def stable(step):
    return PEAK


def decay(step):
    return FLOOR + (PEAK - FLOOR) * (1 - sqrt((step - DECAY) / (TOTAL - DECAY)))


def done(step):
    return FLOOR


PHASES = (warm, stable, decay, done)
STARTS = (WARMUP, DECAY, TOTAL)


class WarmupStableDecay:
    def at(self, step):
        return float(PHASES[bisect_right(STARTS, step)](step))


COMMON = dict(kind="schedule", build=lambda c: WarmupStableDecay(), forward=lambda m, step: m.at(step))
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"schedule": "other", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
