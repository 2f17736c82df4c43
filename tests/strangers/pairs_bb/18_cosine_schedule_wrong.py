WHAT = 'the cosine falls from the whole peak instead of from peak - floor (line 20): all of the decay lies too high, and right after warm-up the rate is peak + floor'
"""Linear warm-up, then half a cosine down to a floor that is a tenth of the peak."""
import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 6e-4, 6e-5, 10, 100


class CosineWithFloor:
    def __init__(self, peak, floor, warmup, total):
        self.peak, self.floor, self.warmup, self.total = peak, floor, warmup, total

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step >= self.total:
            return self.floor
        progress = (step - self.warmup) / (self.total - self.warmup)
        return self.floor + 0.5 * self.peak * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="cosine with a floor",
    build=lambda c: CosineWithFloor(PEAK, FLOOR, WARMUP, TOTAL),
    forward=lambda model, step: model(step),
    declares={
        "schedule": "cosine",
        "peak": PEAK,
        "floor": FLOOR,
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "first_step": 0,
    },
)
