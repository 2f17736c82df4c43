"""Calls that do not repeat themselves: whatever a property compares then differs for that reason alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.probes.dropouts import DropoutWatch
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.layouts import LAYOUTS
from veriformer.properties.subject.paths import Path

UNSTEADY = (
    "attention.", "batch.", "causality.", "cross_attention.", "ffn.", "layer.", "norm.", "numerics.", "padding.",
    "permutation.", "positions.", "residual.", "rotary.",
)  # fmt: skip
"""Families that compare outputs in eval mode."""


def unsteady_opinion(case: Case, problem: Violation) -> str | None:
    """Say that the same call gives another output, that a call changes its arguments, or reads a view as contiguous."""
    mode = next((m for m in ("no_grad", "inference") if f"mode={m}" in problem.path), "grad")
    layout = next((name for name in LAYOUTS if problem.path.endswith(f" {name}")), "")
    if not has_ordinary_inputs(case.subject.kind):
        return None
    built = case.built()
    found = ordinary(case.subject, case.config(), torch.Generator().manual_seed(0), built.dtype)
    inputs = [x.to(case.bench.device) for x in found.tensors]

    def call(given: list[Tensor], path: Path) -> Tensor:
        return case.call(built, *given, *found.extras, path=path).detach().clone()

    path = Path(mode=mode)
    given = _copies(inputs)
    try:
        first = call(given, path)
        changed = [i for i, (x, was) in enumerate(zip(given, inputs, strict=True)) if not torch.equal(x, was)]
        if changed:
            where = "" if mode == "grad" else f" where no gradient is recorded ({mode})"
            return f"the call changes its own argument {changed[0]} in place{where}"
        again = call(_copies(inputs), path)
        limit = 1e-9 if built.dtype == torch.float64 else 1e-4  # not the measured noise: it would hold the cause
        if first.shape == again.shape and worst_difference(again, first, size_of(first)).error > limit:
            with DropoutWatch() as watch:
                third = call(_copies(inputs), path)
            if watch.seen:
                return f"dropout acts in eval mode, at a rate of {max(watch.seen):g}"
            random = worst_difference(third, again, size_of(first)).error > limit
            return (
                "the same call gives another output each time in eval mode: noise is not switched off"
                if random
                else "the second call gives another output than the first: something is kept between calls"
            )
        if layout:
            laid = call(_copies(inputs), replace(path, layout=layout))
            if layout != "expanded" and worst_difference(laid, first, size_of(first)).error > limit:
                return (
                    f"right for contiguous inputs, wrong for the same numbers in another memory layout ({layout}): "
                    "the strides are ignored, memory is read as if it were contiguous"
                )
    except SubjectError:
        return None
    return None


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]
