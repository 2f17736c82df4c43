"""optax.warmup_cosine_decay_schedule without optax. `decay_steps` is the length of the whole schedule."""

import math

from veriformer.properties import Subject


def linear_schedule(init_value, end_value, transition_steps):
    def schedule(count):
        frac = min(max(count / transition_steps, 0.0), 1.0)
        return init_value + (end_value - init_value) * frac

    return schedule


def cosine_decay_schedule(init_value, decay_steps, alpha=0.0):
    def schedule(count):
        count = min(count, decay_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * count / decay_steps))
        return init_value * ((1 - alpha) * cosine + alpha)

    return schedule


def join_schedules(schedules, boundaries):
    def schedule(step):
        out = schedules[0](step)
        for boundary, after in zip(boundaries, schedules[1:]):
            out = out if step < boundary else after(step - boundary)
        return out

    return schedule


def warmup_cosine_decay_schedule(init_value, peak_value, warmup_steps, decay_steps, end_value):
    alpha = end_value / peak_value
    return join_schedules(
        [
            linear_schedule(init_value, peak_value, warmup_steps),
            cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha),
        ],
        [warmup_steps],
    )


rate = warmup_cosine_decay_schedule(0.0, 3e-4, 20, 100, 3e-5)

subject = Subject(
    kind="schedule",
    name="optax-like warm-up and cosine",
    forward=lambda model, step: rate(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 100, "peak": 3e-4, "floor": 3e-5},
)
