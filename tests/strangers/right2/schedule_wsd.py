"""Warm-up, stable, decay: 10 steps up, 60 level, 30 down by 1 - sqrt, then the floor of 1e-5. Unusual: level for most of the
run; right, that is WSD (MiniCPM)."""
from torch import nn
from veriformer.properties import Subject
PEAK, FLOOR, WARM, LEVEL, TOTAL = 1e-3, 1e-5, 10, 70, 100


class WSD(nn.Module):
    def forward(s, step):
        if step < WARM:
            return PEAK * step / WARM
        if step < LEVEL:
            return PEAK
        share = min(1.0, (step - LEVEL) / (TOTAL - LEVEL))
        return FLOOR + (PEAK - FLOOR) * (1.0 - share**0.5)


args = dict(kind="schedule", build=lambda c: WSD(), forward=lambda m, step: m(step))
undeclared = Subject(**args)
declared = Subject(**args, declares={"schedule": "other", "warmup_steps": WARM, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR})
