"""Linear warm-up and a cosine down to a tenth of the peak, as a LambdaLR of a real optimizer whose multiplier is asked for.

Unusual: the schedule object owns a dummy parameter and an AdamW optimizer; the rate of a step is base rate times the lambda, no
step is taken. Behind the last step the rate stays at the floor.
"""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from veriformer.properties import Subject

WARMUP, TOTAL = 20, 200
PEAK, FLOOR = 3e-3, 3e-4


def multiplier(step: int) -> float:
    if step < WARMUP:
        return step / WARMUP
    if step >= TOTAL:
        return FLOOR / PEAK
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return FLOOR / PEAK + (1.0 - FLOOR / PEAK) * share


class CosineWithWarmup:
    def __init__(self):
        weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.AdamW([weight], lr=PEAK)
        self.scheduler = LambdaLR(self.optimizer, lr_lambda=multiplier)

    def __call__(self, step):
        return float(self.scheduler.base_lrs[0] * self.scheduler.lr_lambdas[0](step))


COMMON = dict(kind="schedule", build=lambda c: CosineWithWarmup(), forward=lambda m, step: m(step))
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
