"""Linear warm-up, then a cosine from `peak` down to `floor`."""
import math

from veriformer.properties import Subject


class CosineSchedule:
    def __init__(self, peak=3e-3, floor=3e-4, warmup=10, total=100):
        self.peak, self.floor, self.warmup, self.total = peak, floor, warmup, total

    def lr(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step >= self.total:
            return self.floor
        progress = (step - self.warmup) / (self.total - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.floor + (self.peak - self.floor) * cosine


subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: CosineSchedule(),
    forward=lambda m, step: m.lr(step),
    declares={"schedule": "cosine", "warmup_steps": 10, "total_steps": 100, "peak": 3e-3, "floor": 3e-4},
)
