"""Warm-up and half a cosine down to a floor, as a plain function of the step."""
import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 20, 200


def rate(step):
    if step < WARMUP:
        return PEAK * step / WARMUP
    progress = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return max(FLOOR, PEAK * cosine)


subject = Subject(
    kind="schedule",
    forward=lambda model, step: rate(step),
    declares={"schedule": "cosine", "peak": PEAK, "floor": FLOOR, "warmup_steps": WARMUP, "total_steps": TOTAL},
)

WHAT = 'The cosine falls to zero and is cut off at the floor, instead of falling from the peak to the floor: the rate is too low all the way down and flat for the last fifth (line 14).'
