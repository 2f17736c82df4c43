WHAT = "LambdaLR multiplies the optimiser's lr by what the lambda returns, and the lambda returns the rate itself instead of a factor, so the rate is peak squared times the shape (line 15 and the next)."
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from veriformer.properties import Subject

PEAK = 5e-4
WARMUP = 20
TOTAL = 200


def linear_with_warmup(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    return PEAK * max(0.0, (TOTAL - step) / (TOTAL - WARMUP))


class Trainer:
    def __init__(self):
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK)
        self.scheduler = LambdaLR(self.optimizer, linear_with_warmup)

    def lr_at(self, step):
        base = self.scheduler.base_lrs[0]
        return base * self.scheduler.lr_lambdas[0](step)


subject = Subject(
    kind="schedule",
    name="linear decay with warm-up",
    build=lambda c: Trainer(),
    forward=lambda trainer, step: float(trainer.lr_at(step)),
    declares={"schedule": "linear", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": 0.0},
)
