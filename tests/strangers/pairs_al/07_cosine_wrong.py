WHAT = 'Progress of the cosine counts the warm-up steps too: step / total in place of (step - warmup) / (total - warmup), so that the rate drops at the end of the warm-up (line 17)'
import math
from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 6e-4, 6e-5, 20, 200


class CosineSchedule:
    def __init__(self, peak=PEAK, floor=FLOOR, warmup=WARMUP, total=TOTAL):
        self.peak, self.floor, self.warmup, self.total = peak, floor, warmup, total

    def get_lr(self, it):
        if it < self.warmup:
            return self.peak * it / self.warmup
        if it > self.total:
            return self.floor
        ratio = it / self.total
        coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))
        return self.floor + coeff * (self.peak - self.floor)


subject = Subject(
    kind="schedule", name="cosine", build=lambda c: CosineSchedule(), forward=lambda m, step: m.get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
