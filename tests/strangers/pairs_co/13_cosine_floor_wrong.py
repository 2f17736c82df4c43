"""Warm-up, then half a cosine down to a floor."""
import math

from veriformer.properties import Subject

import torch  # noqa: F401

PEAK, FLOOR, WARMUP, TOTAL = 3e-3, 3e-4, 10, 100


class Cosine:
    def __init__(self, peak, floor, warmup, total):
        self.peak, self.floor, self.warmup, self.total = peak, floor, warmup, total

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        done = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        wave = 0.5 * (1.0 + math.cos(math.pi * done))
        return max(self.floor, self.peak * wave)


subject = Subject(
    kind="schedule",
    name="cosine with a floor",
    build=lambda c: Cosine(PEAK, FLOOR, WARMUP, TOTAL),
    forward=lambda model, step: model(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)

WHAT = (
    'Line 20: '
    'The cosine goes to zero and is cut off at the floor, in place of going from the peak to the floor: too low all the way, and flat before the end.'
)
