"""Linear warm-up, then half a cosine down to a floor."""

import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass(frozen=True)
class CosineSchedule:
    peak: float = 6e-4
    floor: float = 6e-5
    warmup_steps: int = 20
    total_steps: int = 200

    def __call__(self, step):
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.total_steps:
            return self.floor
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="cosine schedule",
    build=lambda c: CosineSchedule(),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 6e-4, "floor": 6e-5},
)
