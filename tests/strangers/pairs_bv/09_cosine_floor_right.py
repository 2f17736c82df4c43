import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


PEAK, FLOOR, WARMUP, TOTAL = 1e-3, 1e-4, 10, 100


def get_lr(it):
    if it < WARMUP:
        return PEAK * it / WARMUP
    if it >= TOTAL:
        return FLOOR
    ratio = (it - WARMUP) / (TOTAL - WARMUP)
    coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))
    return FLOOR + coeff * (PEAK - FLOOR)


subject = Subject(
    kind="schedule",
    forward=lambda m, step: get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR, "first_step": 0},
)
