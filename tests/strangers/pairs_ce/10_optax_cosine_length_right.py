import math

from veriformer.properties import Subject

PEAK, FLOOR, WARMUP, TOTAL = 1e-3, 1e-4, 20, 120


def join_schedules(schedules, boundaries):
    """optax.join_schedules: each schedule counts from its own boundary."""

    def schedule(step):
        value, offset = schedules[0](step), 0
        for nxt, boundary in zip(schedules[1:], boundaries):
            if step >= boundary:
                value = nxt(step - boundary)
        return value

    return schedule


def linear(init, end, steps):
    return lambda count: init + (end - init) * min(max(count / steps, 0.0), 1.0)


def cosine(init, steps, alpha):
    def schedule(count):
        decay = 0.5 * (1 + math.cos(math.pi * min(count, steps) / steps))
        return init * ((1 - alpha) * decay + alpha)

    return schedule


def warmup_cosine():
    return join_schedules([linear(0.0, PEAK, WARMUP), cosine(PEAK, TOTAL - WARMUP, FLOOR / PEAK)], [WARMUP])


rate = warmup_cosine()
subject = Subject(
    kind="schedule",
    name="optax warm-up cosine",
    forward=lambda model, step: float(rate(int(step))),
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
