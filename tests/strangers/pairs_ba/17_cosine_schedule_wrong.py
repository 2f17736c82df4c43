WHAT = 'The progress of the cosine is divided by all steps instead of by those after the warm-up (line 21): at total_steps the rate has not reached its floor.'
# Learning rate of the recipe: linear warm-up, half a cosine down to a tenth, constant afterwards.
import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass(frozen=True)
class WarmupCosine:
    peak: float = 1e-3
    floor: float = 1e-4
    warmup: int = 20
    total: int = 200

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step >= self.total:
            return self.floor
        progress = (step - self.warmup) / self.total
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="warm-up and cosine",
    build=lambda c: WarmupCosine(),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 1e-3, "floor": 1e-4},
)
