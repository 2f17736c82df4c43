"""warmup_cosine_decay_schedule, ported from optax: there decay_steps counts the warm-up too."""
import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 20, 120


def warmup_cosine(step, init=0.0, peak=PEAK, end=FLOOR, warmup_steps=WARMUP, decay_steps=TOTAL):
    if step < warmup_steps:
        return init + (peak - init) * step / warmup_steps
    span = decay_steps
    done = min(step - warmup_steps, span) / span
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * done))


subject = Subject(
    kind="schedule",
    name="cosine from optax",
    forward=lambda model, step: warmup_cosine(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)

WHAT = (
    'In optax decay_steps includes the warm-up, the port lets the cosine last decay_steps behind it: the floor is reached WARMUP steps after TOTAL'
    ' (line 12).'
)
