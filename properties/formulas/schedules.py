"""Wrong schedules of the learning rate: what a rate that falls from its peak to its floor is computed by mistake."""

from __future__ import annotations

import math
from collections.abc import Callable

Rates = Callable[[int], float]
"""From a step to its learning rate."""


def wrong_falls(
    fall: Callable[[float], float], warmup: int, total: int, peak: float, floor: float
) -> list[tuple[str, Rates]]:
    """Return wrong rates from the warm-up on, each with what is wrong in it.

    Args:
        fall: the right curve, from progress in [0, 1] to the share of the peak that is left.
        warmup: steps that the rate rises.
        total: step at which it reaches its floor.
        peak: the highest rate.
        floor: the lowest behind it.
    """
    behind, span = max(1, total - warmup), peak - floor

    def at(progress: float) -> float:
        return fall(min(1.0, max(0.0, progress)))

    def right(step: int) -> float:
        return at((step - warmup) / behind)

    return [
        (
            "progress is step / total: the steps of the warm-up are counted, so that the rate falls at its end at once",
            lambda s: floor + span * at(s / total),
        ),
        (
            "progress is (step - warmup) / total, where it is divided by the steps behind the warm-up, total - warmup",
            lambda s: floor + span * at((s - warmup) / total),
        ),
        (
            "progress is (step - warmup) / total, where it is divided by the steps behind the warm-up, total - warmup: "
            "the floor is never reached",
            lambda s: floor + span * at((min(s, total) - warmup) / total),
        ),
        (
            "progress is (step - warmup) / total, where it is divided by the steps behind the warm-up, total - warmup: "
            "the curve does not end, and the rate jumps to the floor",
            lambda s: floor if s > total else floor + span * at((s - warmup) / total),
        ),
        (
            "progress is (step - warmup) / total, where it is divided by the steps behind the warm-up, total - warmup: "
            "the curve does not end, and the rate jumps to the floor at its last step",
            lambda s: floor if s >= total else floor + span * at((s - warmup) / total),
        ),
        (
            "progress is taken modulo 1: at the end the rate is that of the beginning",
            lambda s: floor + span * fall(max(0, s - warmup) / behind % 1.0),
        ),
        ("the rate falls to 0 and not to the floor", lambda s: peak * right(s)),
        ("the rate falls towards 0 and is cut off at the floor", lambda s: max(floor, peak * right(s))),
        ("the floor is added to a rate that falls from the whole peak", lambda s: floor + peak * right(s)),
        ("the floor is taken for a share of the peak", lambda s: peak * (floor + (1 - floor) * right(s))),
        (
            "past the end the rate goes on along the curve, where the floor is reached",
            lambda s: floor + span * fall((s - warmup) / behind),
        ),
        ("progress is half of what it should be", lambda s: floor + span * at((s - warmup) / behind / 2)),
        ("progress is twice what it should be", lambda s: floor + span * at(2 * (s - warmup) / behind)),
        (
            "it falls along a quarter of a cosine, cos(pi u / 2)",
            lambda s: floor + span * math.cos(math.pi / 2 * min(1.0, max(0.0, (s - warmup) / behind))),
        ),
    ]
