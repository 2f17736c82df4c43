"""Linear warm-up, then half a cosine from the peak to the floor."""

import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass(frozen=True)
class CosineSchedule:
    learning_rate: float = 1e-3
    min_lr: float = 1e-4
    warmup_iters: int = 10
    lr_decay_iters: int = 100

    def get_lr(self, it):
        if it < self.warmup_iters:
            return self.learning_rate * it / self.warmup_iters
        if it > self.lr_decay_iters:
            return self.min_lr
        decay_ratio = (it - self.warmup_iters) / (self.lr_decay_iters - self.warmup_iters)
        coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
        return self.min_lr + coeff * (self.learning_rate - self.min_lr)


subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: CosineSchedule(),
    forward=lambda model, step: model.get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": 10, "total_steps": 100, "peak": 1e-3, "floor": 1e-4},
)
