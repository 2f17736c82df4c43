"""The schedule of the paper, step counted from one, factor 2."""
from veriformer.properties import Subject

class Noam:
    def __init__(self, c, warmup=20, factor=2.0):
        self.d, self.w, self.f = c.d_model, warmup, factor

    def rate(self, step):
        step = max(int(step), 1)
        return self.f * self.d**-0.5 * min(step**-0.5, step * self.w**-1.5)

common = dict(kind="schedule", build=Noam, forward=lambda m, step: m.rate(step))
undeclared = Subject(**common)
declared = Subject(**common, declares={"schedule": "noam", "warmup_steps": 20, "peak": 2.0})
