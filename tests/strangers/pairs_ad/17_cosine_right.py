"""Cosine schedule with linear warm-up, as a LambdaLR factor times the base rate."""

import math
from functools import partial

from veriformer.properties import Subject

MAX_LR, MIN_LR = 6e-4, 6e-5
WARMUP, TOTAL = 20, 200


def _lr_lambda(step, *, num_warmup_steps, num_training_steps, min_ratio):
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return min_ratio + (1.0 - min_ratio) * cosine


factor = partial(_lr_lambda, num_warmup_steps=WARMUP, num_training_steps=TOTAL, min_ratio=MIN_LR / MAX_LR)

subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    forward=lambda model, step: MAX_LR * factor(step),
    declares={
        "schedule": "cosine",
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "peak": MAX_LR,
        "floor": MIN_LR,
    },
)
