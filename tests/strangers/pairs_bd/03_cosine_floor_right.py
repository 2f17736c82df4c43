"""The learning rate of our speech runs: linear warm-up, half a cosine down to min_lr."""

import math

from veriformer.properties import Subject


class WarmupCosine:
    def __init__(self, max_lr=3e-4, min_lr=3e-5, warmup_steps=20, total_steps=200):
        self.max_lr = max_lr
        self.min_lr = min_lr
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps

    def get_lr(self, step):
        if step < self.warmup_steps:
            return self.max_lr * step / self.warmup_steps
        if step >= self.total_steps:
            return self.min_lr
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        ratio = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + (self.max_lr - self.min_lr) * ratio


subject = Subject(
    kind="schedule",
    name="warm-up and cosine",
    build=lambda c: WarmupCosine(),
    forward=lambda model, step: model.get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 3e-4, "floor": 3e-5},
)
