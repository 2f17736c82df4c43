"""Warm-up and cosine decay to a floor, which stays when training goes on."""
import math

from veriformer.properties import Subject

import torch

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 20, 200


def rate(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    progress = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make(parameters):
    """For the trainer."""
    optimizer = torch.optim.AdamW(parameters, lr=1.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


subject = Subject(
    kind="schedule",
    forward=lambda m, step: rate(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
