"""Learning rates by step, and which parameters decay."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def noam(step: int, *, d_model: int, warmup_steps: int) -> float:
    """Return `d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5)`, steps counted from 1 (Vaswani et al. 2017, 5.3).

    Step 0 counts as step 1, so that a scheduler that starts there neither divides by zero nor wastes an update;
    without warm-up the first step has the highest rate.
    """
    step = max(step, 1)
    rise = step * warmup_steps**-1.5 if warmup_steps else math.inf
    return d_model**-0.5 * min(step**-0.5, rise)


def linear(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Return the rate that rises linearly to `peak` at `warmup_steps` and falls linearly to 0 at `total_steps`.

    The first step, 0, already has `peak / (warmup_steps + 1)`: a rate of exactly 0 would waste it.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    return peak * max(0.0, total_steps - step) / max(1, total_steps - warmup_steps)


def cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0) -> float:
    """Return the rate that rises linearly to `peak` and falls to `floor` along half a cosine (SGDR, 2017).

    `floor + (peak - floor) (1 + cos(pi u)) / 2` with u from 0 at `warmup_steps` to 1 at `total_steps`; `floor` after.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    u = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (peak - floor) * (1 + math.cos(math.pi * u)) / 2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups for an optimiser: matrices decay; biases, and gains of norms, do not.

    Every trainable parameter stands in exactly one group, a shared one once. Decided by the number of axes, not by
    names, so that a norm called `ln_1` is not forgotten.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
