"""How much of what a subject gives for ordinary inputs a change of its code moves: what mends most, and moves least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.causes.tracing.lines import tensors_of
from veriformer.properties.engine.stream import SEQUENCES
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary

_SAME = 1e-4
_WHOLE = (8, 16)
"""Lengths that are whole blocks of usual sizes."""


def moved_by(bench: Workbench, anew: Callable[[], Workbench], made: Callable[[], AbstractContextManager[Any]]) -> float:
    """Return the share of ordinary calls, with one sample and with two, of several lengths, that give something else.

    Infinity where its parameters are others.

    Args:
        bench: of the subject.
        anew: makes a workbench of its own for it.
        made: makes the change for a while.
    """
    if _shapes(anew()) != _shapes_with(anew, made):
        return math.inf
    if not has_ordinary_inputs(bench.subject.kind):
        return 0.0
    before = list(_outputs(anew()))
    with made():
        after = list(_outputs(anew()))
    same = [_same(a, b) for a, b in zip(before, after, strict=False)]
    return 1 - sum(same) / max(len(before), 1)


def _shapes_with(anew: Callable[[], Workbench], made: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
    with made():
        return _shapes(anew())


def _shapes(bench: Workbench) -> list[Any]:
    """Return the names and shapes of all parameters."""
    try:
        module = bench.pool.get(bench.configs[0], torch.float32).module
    except Exception:
        return []
    return [(n, p.shape) for n, p in module.named_parameters()] if isinstance(module, torch.nn.Module) else []


def _outputs(bench: Workbench) -> Iterator[list[Tensor] | None]:
    try:
        built = bench.pool.get(bench.configs[0], torch.float32)
    except Exception:
        return
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), torch.float32)
    length = inputs.tensors[0].shape[1] if inputs.tensors[0].ndim > 1 else 0
    lengths = sorted({1, 2, length, *_WHOLE}) if bench.subject.kind in SEQUENCES else [length]
    for samples in (1, 2):
        for some in lengths:
            cut = [x[:samples] if x.ndim > 1 else x for x in inputs.tensors]
            if some != length:
                cut[0] = torch.cat([cut[0]] * -(-some // length), dim=1)[:, :some]
            try:
                with torch.no_grad():
                    yield [x.clone() for x in tensors_of(bench.forward(built, *cut, *inputs.extras))]
            except Exception:
                yield None


def _same(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=_SAME, atol=_SAME, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )
