"""Learning rate: linear warm-up, then half a cosine down to the floor (nanoGPT's get_lr)."""
import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass
class LR:
    learning_rate: float = 6e-4
    min_lr: float = 6e-5
    warmup_iters: int = 20
    lr_decay_iters: int = 200

    def get_lr(self, it):
        if it < self.warmup_iters:
            return self.learning_rate * it / self.warmup_iters
        if it > self.lr_decay_iters:
            return self.min_lr
        ratio = (it - self.warmup_iters) / (self.lr_decay_iters - self.warmup_iters)
        coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))
        return self.min_lr + coeff * (self.learning_rate - self.min_lr)


subject = Subject(
    kind="schedule",
    name="cosine",
    build=lambda c: LR(),
    forward=lambda m, step: m.get_lr(int(step)),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 6e-4, "floor": 6e-5},
)
