"""The learning rate of a nanoGPT fork: linear warm-up, then half a cosine down to a floor."""

import math

from veriformer.properties import Subject

WHAT = "The cosine's progress is step / total instead of (step - warmup) / (total - warmup): the rate jumps down behind the warm-up."
CAUSE = "The cosine starts at step 0, not at the end of the warm-up: at the end of the warm-up the rate jumps below its peak."
PEAK, FLOOR, WARMUP, TOTAL = 6e-4, 6e-5, 200, 1000


def make(progress):
    def get_lr(it):
        if it < WARMUP:
            return PEAK * (it + 1) / (WARMUP + 1)
        if it > TOTAL:
            return FLOOR
        coeff = 0.5 * (1.0 + math.cos(math.pi * progress(it)))
        return FLOOR + coeff * (PEAK - FLOOR)

    return get_lr


def subject(progress):
    get_lr = make(progress)
    return Subject(
        kind="schedule",
        name="get_lr",
        forward=lambda model, step: get_lr(step),
        declares={
            "schedule": "cosine",
            "warmup_steps": WARMUP,
            "total_steps": TOTAL,
            "peak": PEAK,
            "floor": FLOOR,
        },
    )


right = subject(lambda it: (it - WARMUP) / (TOTAL - WARMUP))
wrong = subject(lambda it: it / TOTAL)
