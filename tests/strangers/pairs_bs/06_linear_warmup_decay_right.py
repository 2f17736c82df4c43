"""Learning rate: linear warm-up, linear decay to a floor. A pure function of the step, so that runs can resume."""

from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass(frozen=True)
class LinearWithWarmup:
    peak: float = 3e-4
    floor: float = 3e-5
    warmup: int = 20
    total: int = 100

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * step / self.warmup
        if step >= self.total:
            return self.floor
        remaining = (self.total - step) / (self.total - self.warmup)
        return self.floor + (self.peak - self.floor) * remaining


subject = Subject(
    kind="schedule",
    name="linear with warm-up",
    build=lambda c: LinearWithWarmup(),
    forward=lambda schedule, step: schedule(step),
    declares={"schedule": "linear", "warmup_steps": 20, "total_steps": 100, "peak": 3e-4, "floor": 3e-5},
)
