"""The rounding that one call shows at its own inputs, where a model amplifies it by much and not evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import computes_in_float64, longest_sum, varies
from veriformer.properties.bench.noise import relative_tolerance, sensitivity
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import epsilon


def tolerance_at(bench: Workbench, built: Built, args: Sequence[Any], given: Mapping[str, Any]) -> float:
    """Return the tolerance that the inputs of one call show themselves, where it varies from input to input; else 0.

    Args:
        bench: of the subject.
        built: the model that was called.
        args: what it was called with.
        given: what by name.

    Returns:
        0 too where that cannot be measured: tensors stand behind other arguments, or the moved call raises.
    """
    if built.dtype not in (torch.float32, torch.float64) or not computes_in_float64(bench) or not varies(bench, built):
        return 0.0

    def call(module: Any, moved: list[Tensor]) -> Tensor:
        stand_in = Built(module, built.config, built.dtype, built.is_fresh)
        return bench.forward(stand_in, *moved, *args[len(moved) :], **given)

    tensors = list(takewhile(lambda x: isinstance(x, Tensor), args))
    if any(isinstance(x, Tensor) for x in args[len(tensors) :]):
        return 0.0
    generator, unit = torch.Generator().manual_seed(1), epsilon(built.dtype)
    try:
        floor = sensitivity(built.module, call, tensors, built.dtype, generator, unit, is_ours=built.is_fresh)
    except SubjectError:  # what failed is told, not that it cannot be measured
        return 0.0
    return relative_tolerance(floor, built.dtype, longest_sum(built))
