import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 1e-3, 1e-5, 20, 100


def get_lr(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    if step >= TOTAL:
        return FLOOR
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    return FLOOR + 0.5 * (PEAK - FLOOR) * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="warm-up and cosine",
    forward=lambda model, step: get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 100, "peak": 1e-3, "floor": 1e-5},
)
