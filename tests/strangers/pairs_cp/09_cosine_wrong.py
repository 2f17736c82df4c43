"""Warm-up and half a cosine down to a floor, where it stays while training goes on."""

import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 20, 120


def learning_rate(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    return FLOOR + (PEAK - FLOOR) * (1.0 + math.cos(math.pi * progress)) / 2


subject = Subject(
    kind="schedule",
    forward=lambda model, step: learning_rate(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)

WHAT = "Line 13: progress is not held at 1 after the last step, so that the cosine climbs back to the peak where training goes on (the line that is missing would follow)."
