WHAT = "The cosine phase is TOTAL steps long though it starts after the warm-up, so it reaches its floor at TOTAL + WARMUP and not at total_steps, line 48."
"""A learning rate made of phases, one after another (what SequentialLR does)."""

import math
from dataclasses import dataclass

from veriformer.properties import Subject

WARMUP, TOTAL = 20, 200
PEAK, FLOOR = 3e-4, 3e-5


@dataclass
class Linear:
    start: float
    end: float
    steps: int

    def at(self, step):
        return self.start + (self.end - self.start) * step / self.steps


@dataclass
class Cosine:
    start: float
    end: float
    steps: int

    def at(self, step):
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * step / self.steps)) / 2


class Sequential:
    def __init__(self, *phases):
        self.phases = phases

    def __call__(self, step):
        for phase in self.phases:
            if step < phase.steps:
                return phase.at(step)
            step = step - phase.steps
        return self.phases[-1].end


def make():
    return Sequential(
        Linear(0.0, PEAK, steps=WARMUP),
        Cosine(PEAK, FLOOR, steps=TOTAL),
    )


subject = Subject(
    kind="schedule",
    name="warm-up, then cosine",
    build=lambda c: make(),
    forward=lambda schedule, step: schedule(step),
    declares={
        "schedule": "cosine",
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "peak": PEAK,
        "floor": FLOOR,
    },
)
