"""Numbers that are rounded on the way: a function of steps, whose gradient is the one that passes straight through."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from veriformer.properties.bench.noise import nudged, restored
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import RoundingWatch


def rounds_its_numbers(built: Built, call: Callable[[], object]) -> str | None:
    """Say that numbers are rounded on the way, if what is rounded moves with the parameters: not a position, say.

    A difference quotient of steps is 0 or a jump, whatever the gradient; training wants the slope of the stairs.
    """
    if not isinstance(built.module, nn.Module):
        return None
    seen = []
    with torch.no_grad(), restored(built.module) as kept:
        for step in (0.0, 0.1):  # a tenth: many steps of a rounding to eight bits
            generator = torch.Generator().manual_seed(1)
            for parameter, value in kept:
                parameter.data.copy_(nudged(value, generator, step))
            with RoundingWatch() as watch:
                call()
            seen.append(watch.seen)
    name = next((was[0] for was, now in zip(*seen, strict=False) if was != now), None)
    if name is None:
        return None
    return f"the subject rounds numbers ({name}) that it has a gradient for (declare quantised=True if that is meant)"
