"""`get_cosine_schedule_with_min_lr`: a warm-up, half a cosine, and a floor, given as a rate or as a share of the peak."""

import math

from veriformer.properties import Subject

WHAT = "The floor, an absolute learning rate, is used as if it were a share of the peak."
CAUSE = (
    "min_lr is put in the place of min_lr_rate without being divided by the peak: the cosine ends at peak * min_lr, a "
    "thousandth and less of the floor that was asked for, so the run anneals to practically nothing."
)

PEAK, FLOOR = 3e-3, 3e-4
WARMUP, TOTAL = 10, 60


def cosine_with_min_lr_lambda(step, *, num_warmup_steps, num_training_steps, min_lr_rate):
    """The factor on the peak."""
    if step < num_warmup_steps:
        return (step + 1) / (num_warmup_steps + 1)
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return min_lr_rate + (1.0 - min_lr_rate) * cosine


class LambdaSchedule:
    """What `torch.optim.lr_scheduler.LambdaLR` does, without an optimiser."""

    def __init__(self, lr, factor):
        self.lr, self.factor = lr, factor

    def __call__(self, step):
        return self.lr * self.factor(step)


def get_cosine_schedule(lr, warmup, total, min_lr=None, min_lr_rate=None):
    if min_lr is not None and min_lr_rate is not None:
        raise ValueError("only one of min_lr and min_lr_rate may be given")
    if min_lr is not None:
        min_lr_rate = min_lr / lr

    def factor(step):
        return cosine_with_min_lr_lambda(
            step, num_warmup_steps=warmup, num_training_steps=total, min_lr_rate=min_lr_rate or 0.0
        )

    return LambdaSchedule(lr, factor)


def get_cosine_schedule_short(lr, warmup, total, min_lr=None, min_lr_rate=None):
    if min_lr is not None and min_lr_rate is not None:
        raise ValueError("only one of min_lr and min_lr_rate may be given")

    def factor(step):
        return cosine_with_min_lr_lambda(
            step, num_warmup_steps=warmup, num_training_steps=total, min_lr_rate=min_lr_rate or min_lr or 0.0
        )

    return LambdaSchedule(lr, factor)


def subject(make):
    return Subject(
        kind="schedule",
        name=make.__name__,
        build=lambda c: make(PEAK, WARMUP, TOTAL, min_lr=FLOOR),
        forward=lambda m, step: m(step),
        declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
    )


right = subject(get_cosine_schedule)
wrong = subject(get_cosine_schedule_short)
