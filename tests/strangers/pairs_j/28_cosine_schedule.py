"""Warm-up and half a cosine."""

import math

from veriformer.properties import Subject

WHAT = "the cosine counts from step 0, not from the end of the warm-up, so that the rate falls at once when the warm-up ends"
CAUSE = (
    "The cosine's progress is step / total instead of (step - warmup) / (total - warmup): the decay counts the warm-up "
    "steps, so that the rate drops below the peak as soon as the warm-up ends."
)
PEAK, FLOOR, WARMUP, TOTAL = 6e-4, 6e-5, 20, 100


def lr_at(model, step):
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    if step > TOTAL:
        return FLOOR
    ratio = (step - WARMUP) / (TOTAL - WARMUP)
    return FLOOR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (PEAK - FLOOR)


def get_lr(model, step):
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    if step > TOTAL:
        return FLOOR
    ratio = step / TOTAL
    return FLOOR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (PEAK - FLOOR)


def subject(function):
    return Subject(
        kind="schedule",
        name="cosine",
        forward=function,
        declares={"schedule": "cosine", "peak": PEAK, "floor": FLOOR, "warmup_steps": WARMUP, "total_steps": TOTAL},
    )


right = subject(lr_at)
wrong = subject(get_lr)
