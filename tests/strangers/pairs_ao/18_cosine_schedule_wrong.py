WHAT = "the cosine's progress is divided by all steps, not by those after the warm-up: the rate is still above its floor before total_steps and jumps down there (line 22)."
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
        progress = (step - self.warmup_steps) / self.total_steps
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="cosine schedule",
    build=lambda c: CosineSchedule(),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 6e-4, "floor": 6e-5},
)
