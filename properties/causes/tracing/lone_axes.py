"""Softmaxes over an axis of one entry: every weight is 1, and what the scores are made by is never trained."""

from __future__ import annotations

from os.path import basename
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.asking import measured_once
from veriformer.properties.causes.tracing.lines import line_of_code, text_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary


class _Lone(TorchFunctionMode):
    """Notes the lines at which a softmax is taken along an axis of one entry, others being longer."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[str, int], list[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == "softmax" and args:
            dim = given.get("dim", args[1] if len(args) > 1 else None)
            if dim is not None and args[0].ndim and args[0].shape[dim] == 1 < args[0].numel():
                self.lines.setdefault(line_of_code(), list(args[0].shape))
        return func(*args, **given)


def lone_axis_opinion(case: Case, problem: Violation) -> str | None:
    """Say which softmax of a plain call runs over an axis of one entry, where one does."""
    del problem
    if not has_ordinary_inputs(case.subject.kind):
        return None
    return measured_once(case, "softmax of one", lambda: _told(case))


def _told(case: Case) -> str | None:
    built = case.bench.pool.get(case.config(), torch.float32)
    inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(1), torch.float32)
    try:
        with torch.no_grad(), _Lone() as lone:
            case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    except SubjectError:
        return None
    for (file, number), shape in lone.lines.items():
        if text := text_of(file, number):
            return (
                f"`{text}` ({basename(file)}, line {number}) takes the softmax of {shape} over an axis of one entry: "
                "every weight is 1, whatever the scores, and what makes them is never trained"
            )
    return None
