"""What a declared sink adds to the sum of exponentials; part of `softmax.simplex`."""

from __future__ import annotations

import math

from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.case import Case
from veriformer.properties.families.softmax_axes import softmaxed

_SINK = 1e-2
"""Relative difference of what a sink adds that is rounding: it is read off a difference of numbers near one."""


def sinks_are_one_number(case: Case, built: Built) -> None:
    """Require that what a sink adds to the sum of exponentials, (1 / sum w - 1) sum exp(x), is one for all scores."""
    shift = case.choice("shift", (1.5, -2.0))
    scores = case.normal(2, 6, dtype=built.dtype)
    before, after = (_sink_of(softmaxed(case, built, x), x) for x in (scores, scores + shift))
    case.close(
        after, before, "a sink weighs otherwise where all scores are moved",
        bound=_SINK * float(before.abs().amax()) + 1e3 * epsilon(built.dtype), constants_allowed=True,
        cause=lambda: _moved_sink(before, after, shift),
    )  # fmt: skip


def _sink_of(weights: Tensor, scores: Tensor) -> Tensor:
    """Return what stands in the denominator beside the exponentials of the scores, `[B]`."""
    return (1 / weights.detach().double().sum(-1) - 1) * scores.double().exp().sum(-1)


def _moved_sink(before: Tensor, after: Tensor, shift: float) -> str | None:
    if float((after / before / math.exp(shift) - 1).abs().amax()) > _SINK:
        return None
    return (
        "what the sink adds grows with the scores: it stands beside the exponentials of the scores less their maximum "
        "as it is, and must be multiplied by exp(-maximum) too"
    )
