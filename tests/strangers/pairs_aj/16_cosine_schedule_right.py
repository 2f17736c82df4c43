"""Linear warm-up, then half a cosine down to a floor; a factor function such as LambdaLR takes."""

import math

from veriformer.properties import Subject


class CosineWithWarmup:
    def __init__(self, peak, floor, warmup_steps, total_steps):
        self.peak = peak
        self.ratio = floor / peak
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps

    def factor(self, step):
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
        return self.ratio + (1.0 - self.ratio) * cosine

    def __call__(self, step):
        return self.peak * self.factor(step)


subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: CosineWithWarmup(peak=6e-4, floor=6e-5, warmup_steps=20, total_steps=200),
    forward=lambda m, step: m(step),
    declares={
        "schedule": "cosine",
        "peak": 6e-4,
        "floor": 6e-5,
        "warmup_steps": 20,
        "total_steps": 200,
    },
)
