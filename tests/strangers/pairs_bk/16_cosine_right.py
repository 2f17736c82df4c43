import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 10, 100


def cosine_with_warmup(optimizer, warmup_steps, total_steps, min_lr):
    base_lr = optimizer.param_groups[0]["lr"]
    lowest = min_lr / base_lr

    def lr_lambda(step):
        if step < warmup_steps:
            return step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, lr_lambda)


def build(c):
    weight = torch.nn.Parameter(torch.zeros(1))
    return cosine_with_warmup(torch.optim.AdamW([weight], lr=PEAK), WARMUP, TOTAL, FLOOR)


def rate(scheduler, step):
    return scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step)


subject = Subject(
    kind="schedule",
    build=build,
    forward=rate,
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
