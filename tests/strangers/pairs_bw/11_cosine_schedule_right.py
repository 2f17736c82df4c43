import math
import torch
from torch.optim.lr_scheduler import LambdaLR
from veriformer.properties import Subject

WARMUP, TOTAL, PEAK, FLOOR = 20, 120, 1e-3, 1e-4


def factor(step, floor_ratio=FLOOR / PEAK):
    if step < WARMUP:
        return step / WARMUP
    progress = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
    return floor_ratio + (1.0 - floor_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Scheduler:
    def __init__(self):
        self.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
        self.inner = LambdaLR(self.optimizer, factor)

    def rate(self, step):
        return self.inner.base_lrs[0] * self.inner.lr_lambdas[0](step)


subject = Subject(kind="schedule", build=lambda c: Scheduler(), forward=lambda m, step: m.rate(step),
                  declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR})
