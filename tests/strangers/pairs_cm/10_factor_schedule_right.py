"""A learning rate as a product of named factors, in the manner of T5X: 'peak * linear_warmup * linear_decay'."""
from veriformer.properties import Subject

import torch  # noqa: F401  (the optimiser lives elsewhere)

PEAK, FLOOR, WARMUP, TOTAL = 3e-3, 3e-4, 40, 400


def linear_warmup(step):
    return min(1.0, step / WARMUP)


def linear_decay(step):
    left = (TOTAL - step) / (TOTAL - WARMUP)
    return FLOOR / PEAK + (1.0 - FLOOR / PEAK) * min(1.0, max(0.0, left))


def rate(step):
    value = PEAK
    for factor in (linear_warmup, linear_decay):
        value = value * factor(step)
    return value


subject = Subject(
    kind="schedule",
    forward=lambda model, step: rate(step),
    declares={
        "schedule": "linear",
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "peak": PEAK,
        "floor": FLOOR,
    },
)
