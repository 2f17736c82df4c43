WHAT = "The decay falls from peak + floor instead of from peak: the rate jumps above the peak where the decay begins, while its end is right (line 38)."

"""Warm-up, stable, decay: the learning rate of runs whose end is decided late (1 - sqrt, as in Haegele et al.)."""

import math

from veriformer.properties import Subject


class WarmupStableDecay:
    """Rates by step; a pure function of the step, so that a run can be taken up anywhere.

    warm-up    0 .. warmup            linear from 0 to `peak`
    stable     warmup .. total-decay  `peak`
    decay      total-decay .. total   from `peak` to `floor`, fast at first
    afterwards                        `floor`
    """

    def __init__(self, peak, floor, warmup, decay, total):
        if warmup + decay > total:
            raise ValueError("warm-up and decay do not fit into the run")
        self.peak, self.floor = peak, floor
        self.warmup, self.decay, self.total = warmup, decay, total

    @property
    def decay_start(self):
        return self.total - self.decay

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step <= self.decay_start:
            return self.peak
        if step >= self.total:
            return self.floor
        progress = (step - self.decay_start) / self.decay
        remaining = 1 - math.sqrt(progress)
        return self.floor + self.peak * remaining

    def apply(self, optimizer, step):
        """Set the rates of an optimizer; a group's `lr_scale` multiplies its own."""
        rate = self(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        return rate


subject = Subject(
    kind="schedule",
    name="warm-up, stable, decay",
    build=lambda c: WarmupStableDecay(peak=2e-3, floor=2e-4, warmup=20, decay=40, total=200),
    forward=lambda model, step: float(model(step)),
    declares={"schedule": "other", "warmup_steps": 20, "total_steps": 200, "peak": 2e-3, "floor": 2e-4},
)
