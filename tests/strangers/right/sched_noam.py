"""The Noam schedule of the paper as a plain function object: factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5).

Unusual: it is no torch scheduler; step 0 gives 0, which is the limit of the formula's rising branch. Factor 2.
"""

from veriformer.properties import Subject

WARMUP = 40
FACTOR = 2.0


class Noam:
    def __init__(self, model_size, factor=FACTOR, warmup=WARMUP):
        self.model_size, self.factor, self.warmup = model_size, factor, warmup

    def rate(self, step):
        if step <= 0:
            return 0.0
        rising = step * self.warmup ** (-1.5)
        falling = step ** (-0.5)
        return self.factor * (self.model_size ** (-0.5) * min(falling, rising))


COMMON = dict(
    kind="schedule",
    build=lambda c: Noam(c.d_model),
    forward=lambda m, step: m.rate(step),
)
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"schedule": "noam", "warmup_steps": WARMUP, "peak": FACTOR})
