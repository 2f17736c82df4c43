WHAT = "The cosine is scaled by the peak rather than by peak minus floor (get_lr, line 23), so the rate jumps to peak + floor at the end of the warm-up and is too high all the way down."
"""Learning rate: linear warm-up, then half a cosine from the peak to the floor, where it stays."""
import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass
class CosineSchedule:
    max_lr: float = 6e-4
    min_lr: float = 6e-5
    warmup_iters: int = 40
    lr_decay_iters: int = 400

    def get_lr(self, it):
        if it < self.warmup_iters:
            return self.max_lr * it / self.warmup_iters
        if it > self.lr_decay_iters:
            return self.min_lr
        ratio = (it - self.warmup_iters) / (self.lr_decay_iters - self.warmup_iters)
        coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))
        return self.min_lr + coeff * self.max_lr


subject = Subject(
    kind="schedule",
    name="cosine with a floor",
    build=lambda c: CosineSchedule(),
    forward=lambda m, step: m.get_lr(step),
    declares={
        "schedule": "cosine", "warmup_steps": 40, "total_steps": 400, "peak": 6e-4, "floor": 6e-5, "first_step": 0,
    },
)
