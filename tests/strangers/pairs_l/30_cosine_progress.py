"""Warm-up and cosine decay as in GPT-3 / LLaMA."""

import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 20, 200


def schedule(progress):
    def rate(step):
        if step < WARMUP:
            return PEAK * (step + 1) / (WARMUP + 1)
        if step >= TOTAL:
            return FLOOR
        return FLOOR + 0.5 * (PEAK - FLOOR) * (1 + math.cos(math.pi * progress(step)))

    return rate


def subject(rate):
    return Subject(
        kind="schedule",
        name="cosine",
        forward=lambda model, step: rate(step),
        declares={
            "schedule": "cosine",
            "warmup_steps": WARMUP,
            "total_steps": TOTAL,
            "peak": PEAK,
            "floor": FLOOR,
            "first_step": 0,
        },
    )


right = subject(schedule(lambda step: (step - WARMUP) / (TOTAL - WARMUP)))
wrong = subject(schedule(lambda step: step / TOTAL))
WHAT = "progress is step / total instead of (step - warmup) / (total - warmup): the rate drops at the end of the warm-up"
CAUSE = (
    "The cosine's progress counts the warm-up steps too, so the rate jumps down behind the warm-up and never reaches its peak; "
    "it lies below the declared cosine until the end."
)
