"""How a model is trained: steps, batch, optimiser and the schedule of its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "linear", "cosine")
OBJECTIVES = ("task", "next", "masked")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW with a linear warm-up.

    Attributes:
        steps: of the optimiser.
        batch_size: samples a step, B.
        learning_rate: after warm-up.
        warm_up: steps over which the rate rises linearly from 0.
        schedule: after warm-up, one of `SCHEDULES`; linear and cosine end at 0.
        clip: largest norm of the gradient; 0: not clipped.
        weight_decay: decoupled (Loshchilov & Hutter 2019).
        beta2: of AdamW.
        label_smoothing: share of the target spread over all classes.
        num_samples: training samples in all, gone through again and again; 0: fresh ones every step.
        autocast: whether the forward runs under bfloat16 autocast.
        objective: what is asked in training: "task", what the test asks; for tasks with a hidden token "next", every
            token but the first (Radford et al. 2018), or "masked", a random share of them (Devlin et al. 2019).
        mask_share: of the tokens, for "masked".
    """

    steps: int = 250
    batch_size: int = 32
    learning_rate: float = 1e-3
    warm_up: int = 0
    schedule: str = "constant"
    clip: float = 0.0
    weight_decay: float = 0.01
    beta2: float = 0.999
    label_smoothing: float = 0.0
    num_samples: int = 0
    autocast: bool = False
    objective: str = "task"
    mask_share: float = 0.15

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule was {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective was {self.objective!r}; it must be one of {', '.join(OBJECTIVES)}")
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps was {self.steps} and batch_size {self.batch_size}; both must be at least 1")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0.

        >>> Recipe(learning_rate=1.0, warm_up=4).rate_at(0)
        0.25
        """
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.schedule]
        return self.learning_rate * factor
