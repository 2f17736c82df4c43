"""Linear warm-up over 10 steps to 1e-3, then half a cosine down to 1e-5 at step 100."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Schedule:
    def __init__(self, bad, peak=1e-3, floor=1e-5, warmup=10, total=100):
        self.peak, self.floor, self.warmup, self.total, self.bad = peak, floor, warmup, total, bad

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.bad:
            progress = min(1.0, step / self.total)
        else:
            progress = min(1.0, (step - self.warmup) / (self.total - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def subject(bad):
    return Subject(kind="schedule", build=lambda c: Schedule(bad), forward=lambda m, step: m(step),
                   declares={"schedule": "cosine", "warmup_steps": 10, "total_steps": 100, "peak": 1e-3, "floor": 1e-5})


right, wrong = subject(False), subject(True)
WHAT = "The cosine's progress counts from step 0 instead of from the end of the warm-up: the peak is never reached and the rate is too low after it."
PLACE = "cosine decay (progress after the warm-up)"
