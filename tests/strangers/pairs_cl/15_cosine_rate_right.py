"""Learning rate of the vision recipe: linear warm-up, half a cosine down to the floor, then the floor."""

import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 1e-5, 20, 200


def rate(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    progress = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
    return FLOOR + 0.5 * (PEAK - FLOOR) * (1 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="cosine rate",
    forward=lambda model, step: rate(step),
    declares={
        "schedule": "cosine",
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "peak": PEAK,
        "floor": FLOOR,
    },
)
