WHAT = 'The progress of the cosine is taken modulo 1 (line 23: `progress % 1.0`, left from warm restarts, instead of min(1, progress)), so that at total_steps itself the rate jumps back to the peak instead of having fallen to the floor, and falls again behind it.'
"""Learning rate as a product of factors, after the flax examples."""
import math

from veriformer.properties import Subject


def create_learning_rate_scheduler(factors="constant * linear_warmup * cosine_decay", base_learning_rate=1e-3,
                                   warmup_steps=10, steps_per_cycle=90):
    names = [n.strip() for n in factors.split("*")]

    def step_fn(step):
        ret = 1.0
        for name in names:
            if name == "constant":
                ret *= base_learning_rate
            elif name == "linear_warmup":
                ret *= min(1.0, step / warmup_steps)
            elif name == "rsqrt_decay":
                ret /= math.sqrt(max(step, warmup_steps))
            elif name == "cosine_decay":
                progress = max(0.0, (step - warmup_steps) / steps_per_cycle)
                ret *= 0.5 * (1.0 + math.cos(math.pi * (progress % 1.0)))
            else:
                raise ValueError(f"Unknown factor {name}.")
        return ret

    return step_fn


subject = Subject(
    kind="schedule",
    name="factors",
    build=lambda c: create_learning_rate_scheduler(),
    forward=lambda m, step: m(step),
    declares={"schedule": "cosine", "warmup_steps": 10, "total_steps": 100, "peak": 1e-3, "floor": 0.0, "first_step": 0},
)
