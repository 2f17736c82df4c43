import dataclasses
import math

from veriformer.properties import Subject


@dataclasses.dataclass(frozen=True)
class WarmupCosine:
    peak: float = 6e-4
    floor: float = 6e-5
    warmup_steps: int = 20
    total_steps: int = 200

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        progress = min(1.0, progress)
        return self.floor + 0.5 * (self.peak - self.floor) * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="warm-up and cosine",
    build=lambda c: WarmupCosine(),
    forward=lambda schedule, step: schedule.lr(step),
    declares={
        "schedule": "cosine",
        "peak": 6e-4,
        "floor": 6e-5,
        "warmup_steps": 20,
        "total_steps": 200,
        "first_step": 0,
    },
)
