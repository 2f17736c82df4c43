WHAT = 'the floor is added to a cosine of the full peak instead of peak - floor: the rate jumps above its declared peak when warm-up ends (line 20).'
import math
from dataclasses import dataclass
from veriformer.properties import Subject


@dataclass
class CosineWithFloor:
    peak: float = 6e-4
    floor: float = 6e-5
    warmup: int = 10
    total: int = 100

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step >= self.total:
            return self.floor
        done = (step - self.warmup) / (self.total - self.warmup)
        return self.floor + self.peak * 0.5 * (1.0 + math.cos(math.pi * done))


subject = Subject(
    kind="schedule",
    build=lambda c: CosineWithFloor(),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": 10, "total_steps": 100, "peak": 6e-4, "floor": 6e-5,
              "first_step": 0},
)
