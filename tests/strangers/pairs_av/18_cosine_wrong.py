WHAT = "the cosine's progress is divided by all steps and not by those behind the warm-up: the rate is above the floor to the last step and then falls there in one jump (line 21)"
"""Linear warm-up, then half a cosine down to a floor."""
import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass(frozen=True)
class WarmupCosine:
    max_lr: float = 3e-4
    min_lr: float = 3e-5
    warmup: int = 20
    total: int = 120

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.max_lr * step / self.warmup
        if step >= self.total:
            return self.min_lr
        progress = (step - self.warmup) / self.total
        return self.min_lr + (self.max_lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="warmup cosine",
    build=lambda c: WarmupCosine(),
    forward=lambda m, step: m(step),
    declares={
        "schedule": "cosine",
        "warmup_steps": 20,
        "total_steps": 120,
        "peak": 3e-4,
        "floor": 3e-5,
        "first_step": 0,
    },
)
