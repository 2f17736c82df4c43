"""SGDR: cosine with warm restarts at 20, 60, 140 ... (each cycle twice as long), no warm-up. Unusual: the rate jumps back up;
right, that is what restarts are, hence 'other'."""
import math
from torch import nn
from veriformer.properties import Subject
PEAK, FLOOR, FIRST = 1e-3, 1e-5, 20


class SGDR(nn.Module):
    def forward(s, step):
        start, length = 0, FIRST
        while step >= start + length:
            start, length = start + length, 2 * length
        return FLOOR + 0.5 * (PEAK - FLOOR) * (1.0 + math.cos(math.pi * (step - start) / length))


args = dict(kind="schedule", build=lambda c: SGDR(), forward=lambda m, step: m(step))
undeclared = Subject(**args)
declared = Subject(**args, declares={"schedule": "other", "warmup_steps": 0, "peak": PEAK})
