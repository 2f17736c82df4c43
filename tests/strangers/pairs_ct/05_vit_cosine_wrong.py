"""Learning rate of the image model: linear warm-up, then half a cosine down to the floor."""
import math

import torch  # noqa: F401

from veriformer.properties import Subject

BASE_LR, MIN_LR = 1e-3, 1e-5
WARMUP, TOTAL = 20, 120


def adjust_learning_rate(step):
    if step < WARMUP:
        return BASE_LR * step / WARMUP
    if step >= TOTAL:
        return MIN_LR
    done = step / TOTAL
    return MIN_LR + (BASE_LR - MIN_LR) * 0.5 * (1.0 + math.cos(math.pi * done))


subject = Subject(
    kind="schedule",
    name="warm-up and cosine",
    build=lambda c: None,
    forward=lambda m, step: float(adjust_learning_rate(step)),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": BASE_LR, "floor": MIN_LR},
)

WHAT = 'The cosine runs over all steps, the warm-up among them (line 17): the rate falls off at the end of the warm-up and never is what it was meant to be until the last step.'
