import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass
class CosineWithFloor:
    peak: float = 3e-4
    floor: float = 3e-5
    warmup_steps: int = 20
    total_steps: int = 200

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.total_steps:
            return self.floor
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        coefficient = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + coefficient * (self.peak - self.floor)


subject = Subject(
    kind="schedule",
    name="forecaster schedule",
    build=lambda c: CosineWithFloor(),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 3e-4, "floor": 3e-5,
              "first_step": 0},
)
