"""Linear warm-up over 10 steps, half a cosine to a floor of 1e-5 at step 100, constant from then on."""
import math
from veriformer.properties import Subject

def lr(step, peak=1e-3, floor=1e-5, warm=10, total=100):
    if step < warm:
        return peak * step / warm
    t = min(1.0, (step - warm) / (total - warm))
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * t))

common = dict(kind="schedule", build=lambda c: lr, forward=lambda m, step: m(int(step)))
undeclared = Subject(**common)
declared = Subject(**common, declares={"schedule": "cosine", "warmup_steps": 10, "total_steps": 100, "peak": 1e-3, "floor": 1e-5})
