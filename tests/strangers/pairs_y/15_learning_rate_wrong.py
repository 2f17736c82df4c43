WHAT = "The cosine's progress divides the steps since the warm-up by total_steps instead of by total_steps - warmup_steps, so that the rate never comes down to its floor (line 29)."
import math

import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

PEAK = 3e-4
FLOOR = 3e-5
WARMUP = 40
TOTAL = 200


class CosineWithWarmup(nn.Module):
    """Linear from 0 to the peak, then half a cosine down to the floor, where it stays."""

    def __init__(self, peak, floor, warmup_steps, total_steps):
        super().__init__()
        if warmup_steps >= total_steps:
            raise ValueError("no step is left after the warm-up")
        self.peak, self.floor = peak, floor
        self.warmup_steps, self.total_steps = warmup_steps, total_steps

    def forward(self, step):
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.total_steps:
            step = self.total_steps
        progress = (step - self.warmup_steps) / self.total_steps
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (self.peak - self.floor) * share


def optimizer_with(model, schedule):
    """How it is used in training: the factor of a LambdaLR over a rate of one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)


subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: CosineWithWarmup(PEAK, FLOOR, WARMUP, TOTAL),
    forward=lambda model, step: model(step),
    declares={
        "schedule": "cosine",
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "peak": PEAK,
        "floor": FLOOR,
    },
)
