"""nanoGPT's learning rate: linear warm-up, then a cosine down to min_lr."""

import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass
class TrainConfig:
    learning_rate: float = 6e-4
    min_lr: float = 6e-5
    warmup_iters: int = 20
    lr_decay_iters: int = 200

    def get_lr(self, it):
        # 1) linear warmup for warmup_iters steps
        if it < self.warmup_iters:
            return self.learning_rate * it / self.warmup_iters
        # 2) if it > lr_decay_iters, return min learning rate
        if it > self.lr_decay_iters:
            return self.min_lr
        # 3) in between, use cosine decay down to min learning rate
        decay_ratio = (it - self.warmup_iters) / (self.lr_decay_iters - self.warmup_iters)
        coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
        return self.min_lr + coeff * (self.learning_rate - self.min_lr)


subject = Subject(
    kind="schedule",
    name="nanoGPT's schedule",
    build=lambda c: TrainConfig(),
    forward=lambda model, step: model.get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 6e-4, "floor": 6e-5},
)
