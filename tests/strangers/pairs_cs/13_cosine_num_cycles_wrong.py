"""get_cosine_schedule_with_warmup, generalised by `num_cycles` and `min_lr`."""
import math

import torch

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 10, 100


def cosine_with_min_lr(step, peak=PEAK, min_lr=FLOOR, warmup=WARMUP, total=TOTAL, num_cycles=0.5):
    if step < warmup:
        return peak * step / max(1, warmup)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * progress))
    return min_lr + (peak - min_lr) * max(0.0, factor)


subject = Subject(
    kind="schedule",
    name="cosine with a floor",
    forward=lambda model, step: cosine_with_min_lr(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)

WHAT = (
    'The factor 2 in cos(pi * 2 * num_cycles * progress) is lost (line 15): with half a cycle the rate ends halfway between peak and floor instead of at the floor.'
)
