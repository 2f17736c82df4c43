"""The line of a forward that gives the first NaN, and what it was given."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.asking import measured_once
from veriformer.properties.causes.tracing.lines import Step, Trace, told
from veriformer.properties.diagnosis.unsteady import READS
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary

_NAMED = re.compile(r"\bin (float16|bfloat16|float32)\b")


def nonfinite_opinion(case: Case, problem: Violation) -> str | None:
    """Say where NaN comes from, where the subject gives it for ordinary inputs in the dtype of the failing case."""
    if not has_ordinary_inputs(case.subject.kind):
        return None
    named = _NAMED.search(problem.headline)
    dtype = getattr(torch, named[1]) if named else case.dtype()
    return measured_once(case, ("NaN", case.config(), dtype), lambda: _first_nan(case, dtype))


def _first_nan(case: Case, dtype: torch.dtype) -> str | None:
    built = case.bench.pool.get(case.config(), dtype)
    for seed in range(12):
        inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(seed), dtype)
        try:
            with torch.no_grad(), Trace() as trace:
                output = case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
        except SubjectError:
            return None
        if bool(output.isnan().any()):
            return _said(trace.steps, dtype)
    return None


def _said(steps: list[Step], dtype: torch.dtype) -> str | None:
    made = (i for i, s in enumerate(steps) if _has(s.outputs, torch.isnan) and not _has(s.inputs, torch.isnan))
    at = next(made, None)
    if at is None or not (where := told(steps[at])):
        return None
    if steps[at].name in _UNWRITTEN:
        return READS
    name, step = str(dtype).removeprefix("torch."), steps[at]
    before = [s for s in steps[:at] if _has(s.outputs, _infinite) and not _has(s.inputs, _infinite)]
    if _has(step.inputs, _infinite) and before:
        one = before[-1]
        if one.name in _UNWRITTEN:
            return READS
        zero = any(bool((x == 0).any()) for x in one.inputs)
        zeros = "a zero (an eps that is too small is 0 there, too)" if dtype in _HALVES else "a zero"
        given = zeros if zero and one.name in _OF_ZERO else f"numbers up to {_largest(one.inputs):.3g}"
        begins = f"in {name} `{one.name}` gives infinity for {given} at {told(one)}"
        return f"{begins}; the first NaN is made of it at {where}"
    most = _largest(step.inputs)
    return f"in {name} the first NaN is given by `{step.name}` at {where}, for numbers up to {most:.3g}"


_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided")
_HALVES = (torch.float16, torch.bfloat16)
_OF_ZERO = ("rsqrt", "reciprocal", "div", "__truediv__", "true_divide", "log", "pow", "__pow__", "__rtruediv__")


def _infinite(x: Tensor) -> Tensor:
    return x == torch.inf


def _has(tensors: list[Tensor], what: Callable[[Tensor], Tensor]) -> bool:
    return any(x.is_floating_point() and bool(what(x).any()) for x in tensors)


def _largest(tensors: list[Tensor]) -> float:
    finite = [x[x.isfinite()].abs() for x in tensors if x.is_floating_point()]
    return max((float(x.max()) for x in finite if x.numel()), default=0.0)
