WHAT = 'the cosine is scaled by peak instead of peak - floor (line 18), so that behind the warm-up the rate jumps to peak + floor'
import math

from veriformer.properties import Subject


class CosineWithWarmup:
    def __init__(self, peak=6e-4, floor=6e-5, warmup_steps=20, total_steps=200):
        self.peak, self.floor = peak, floor
        self.warmup_steps, self.total_steps = warmup_steps, total_steps

    def get_lr(self, step):
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.total_steps:
            return self.floor
        ratio = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.floor + 0.5 * (1.0 + math.cos(math.pi * ratio)) * self.peak


subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: CosineWithWarmup(),
    forward=lambda m, step: m.get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 6e-4, "floor": 6e-5},
)
