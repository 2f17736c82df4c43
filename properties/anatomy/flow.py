"""One forward of a case's model, ready to be taken apart: samples and positions that no other size coincides with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, attentions
from veriformer.properties.anatomy.traced import Traced, traced
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case

BATCH, LENGTH, OTHER = 5, 7, 8
"""Samples, positions, and positions of the other of two sequences."""

_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference that is rounding: float64 models have tables that were made in float32."""


@dataclass(frozen=True)
class Flow:
    """A forward that can be run again and taken apart.

    Attributes:
        built: its model.
        run: calls it.
        limit: largest relative difference that is rounding.
        length: positions of its sequence.
        other: positions of its other sequence; 0 if it has one.
        sequences: what it is called on, `[B, T]` or `[B, T, D]`; of two the source first.
    """

    built: Built
    run: Callable[[], Any]
    limit: float
    length: int
    other: int
    sequences: tuple[Tensor, ...]

    @property
    def tokens(self) -> Tensor:
        """The sequence whose positions outputs belong to."""
        return self.sequences[-1]

    @property
    def module(self) -> nn.Module:
        """The model."""
        module: nn.Module = self.built.module
        return module

    def traced(self) -> Traced:
        """Return what is computed."""
        return traced(self.module, self.run)


def flow(case: Case) -> Flow:
    """Return a forward of the case's model in the widest dtype that it computes in, on drawn inputs."""
    built = case.built(dtype=judged_dtypes(case.bench)[-1])
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no torch module")
    if built.dtype not in _LIMITS:
        case.does_not_apply(f"in {built.dtype} parts cannot be told by their numbers")
    longest = min(case.subject.fact("max_len", built.config.max_len), built.config.max_len)
    if longest < LENGTH:
        case.does_not_apply(f"it takes {longest} positions, and {LENGTH} are needed to tell parts by their numbers")
    two = case.subject.kind == "encoder_decoder"
    if two and longest < OTHER:
        case.does_not_apply(f"it takes {longest} positions, and {OTHER} are needed to tell parts by their numbers")
    tokens = _drawn(case, built, LENGTH)
    inputs = (_drawn(case, built, OTHER), tokens) if two else (tokens,)
    return Flow(built, case.caller(built, *inputs), _LIMITS[built.dtype], LENGTH, OTHER if two else 0, inputs)


def _drawn(case: Case, built: Built, length: int) -> Tensor:
    if case.subject.takes_tokens:
        return case.tokens(BATCH, length)
    return case.normal(BATCH, length, built.config.d_model, dtype=built.dtype)


def attended(module: nn.Module, run: Callable[[], Any], limit: float) -> list[Attention]:
    """Return the attentions of a forward whose weights follow its scores, in order."""
    found = attentions(traced(module, run), BATCH, limit)
    return [a for a in found if bool((a.misfit <= 10 * limit * (1 + a.bias.abs().amax((1, 2)))).all())]
