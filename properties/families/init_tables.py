"""Tables of a GPT-2: they start as large as the matrices of its layers."""

from __future__ import annotations

import math
from functools import partial
from os.path import basename
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from veriformer.properties.causes.tracing.lines import line_of_code, text_of
from veriformer.properties.engine.case import Case

_FACTORS = (1.0, 0.5)
"""Of the matrices' deviation: 0.02, and 0.01 for positions in the released code."""


def tables_start_alike(case: Case, module: nn.Module, usual: float, deviations: float) -> None:
    """Require that each table of embeddings starts as large as matrices do, or half as large.

    Args:
        case: that judges.
        module: as it was built.
        usual: root mean square of the matrices that do not write into the stream.
        deviations: standard deviations that chance may make.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding):
            continue
        root = case.apply(root_mean_square, part.weight)
        slack = deviations / math.sqrt(2 * part.weight.numel()) + 0.1  # and what the matrices themselves err by
        near = ((root / (usual * factor) - 1).abs() <= slack for factor in _FACTORS)
        case.require(
            torch.stack([*near]).any(),
            f"{name}.weight starts {float(root) / usual:.3g} times as large as the matrices of the layers",
            got=f"a deviation of {float(root):.3g}",
            expected=f"{usual:.3g}, or half of it",
            cause=partial(_cause, case, f"{name}.weight"),
        )


class _Draws(TorchFunctionMode):
    """Notes of which mean and deviation tensors are drawn, and at which line, the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, tuple[float, float, tuple[str, int]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == "normal_":
            named = dict(zip(("tensor", "mean", "std"), args, strict=False)) | given
            drawn = float(named.get("mean", 0.0)), float(named.get("std", 1.0)), line_of_code()
            self.last[id(named.get("tensor"))] = drawn
        return func(*args, **given)


def _cause(case: Case, name: str) -> str:
    left_out = f"{name} is left out where the weights are initialised"
    if case.subject.build is None:
        return left_out
    with _Draws() as draws, torch.random.fork_rng(devices=[]):
        module = case.subject.build(case.config())
    weight = dict(module.named_parameters()).get(name)
    mean, deviation, (file, number) = draws.last.get(id(weight), (0.0, 1.0, ("", 0)))
    text = text_of(file, number) if file else ""
    if mean and deviation == 1 and text:
        return (
            f"`{text}` ({basename(file)}, line {number}) draws {name} with a mean of {mean:g} and a deviation of 1: "
            "what is given is taken for the mean, not for the deviation (std=)"
        )
    if text and deviation != 1:
        return f"`{text}` ({basename(file)}, line {number}) draws {name} with a deviation of {deviation:g}"
    return left_out


def root_mean_square(table: Tensor) -> Tensor:
    """Return the root of the mean square of a table, without rows of zeros, which are those of padding."""
    rows = table.detach().double()
    return rows[rows.any(1)].square().mean().sqrt()
