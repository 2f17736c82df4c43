"""Warm-up and cosine decay as two schedules joined at a border, in the manner of optax."""

import math

from torch import nn

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 3e-4, 3e-5, 20, 100


def linear_schedule(init, end, steps):
    return lambda count: init + (end - init) * min(max(count, 0), steps) / steps


def cosine_decay_schedule(init, decay_steps, floor):
    def schedule(count):
        count = min(max(count, 0), decay_steps)
        return floor + (init - floor) * 0.5 * (1 + math.cos(math.pi * count / decay_steps))

    return schedule


def join_schedules(schedules, boundaries):
    def schedule(step):
        value = schedules[0](step)
        for boundary, following in zip(boundaries, schedules[1:]):
            if step >= boundary:
                value = following(step - boundary)
        return value

    return schedule


class WarmupCosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = join_schedules(
            [linear_schedule(0.0, PEAK, WARMUP), cosine_decay_schedule(PEAK, TOTAL - WARMUP, FLOOR)], [WARMUP]
        )

    def forward(self, step):
        return float(self.rate(step))


subject = Subject(
    kind="schedule",
    build=lambda c: WarmupCosine(),
    forward=lambda model, step: model(step),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
