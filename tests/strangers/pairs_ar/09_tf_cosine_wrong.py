WHAT = "TF's alpha is a share of the peak, but the absolute floor is given (`alpha=FLOOR` in build): the rate ends at 0.3 * 0.06 = 0.018 and not at 0.06, and is too low on the way there"
"""tf.keras.optimizers.schedules.CosineDecay with warm-up, ported."""
import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass
class CosineDecay:
    peak: float
    warmup: int
    decay_steps: int
    alpha: float  # what is left at the end, as a share of the peak

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        done = min(step - self.warmup, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.peak * ((1 - self.alpha) * cosine + self.alpha)


PEAK, FLOOR, WARMUP, TOTAL = 0.3, 0.06, 10, 110

subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: CosineDecay(PEAK, WARMUP, TOTAL - WARMUP, alpha=FLOOR),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
