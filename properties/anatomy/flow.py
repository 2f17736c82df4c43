"""One forward of a case's model, taken apart: samples and positions that no other size coincides with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.traced import Traced, traced
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.tally import Tally
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.palette import LONG
from veriformer.properties.subject.sizes import DrawnConfig

BATCH, LENGTH, FEWEST = 5, 14, 7
"""Samples; positions where no window is longer; positions that suffice."""

FAR, FEW = 301, 2
"""Positions of the case that looks far out, beyond 256 and no whole number of blocks; its samples."""

_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference that is rounding: float64 models have tables that were made in float32."""


@dataclass(frozen=True)
class Flow:
    """A forward that was taken apart.

    Attributes:
        case: of it.
        built: its model.
        inputs: what it was called on, `[B, T]` or `[B, T, D]`, a source before its target, and a memory behind.
        length: positions T of its sequence.
        other: positions of its other sequence; 0 if it has one.
        limit: largest relative difference that is rounding.
        seen: its trace.
    """

    case: Case
    built: Built
    inputs: tuple[Tensor, ...]
    length: int
    other: int
    limit: float
    seen: Traced

    @property
    def module(self) -> nn.Module:
        """The model."""
        module: nn.Module = self.built.module
        return module

    @property
    def width(self) -> int:
        """Channels D of the model: those of most of its modules, where an instance came without its sizes."""
        subject = self.case.subject
        if subject.build is None and subject.config is None and self.seen.calls:
            return Counter(call.given.shape[-1] for call in self.seen.calls).most_common(1)[0][0]
        return self.built.config.d_model

    def said_twice(self) -> Traced:
        """Return the trace of a forward on the first half of each sequence, said twice."""
        return _traced(
            self.case,
            self.built,
            tuple(torch.cat([x[:, : x.shape[1] // 2]] * 2, dim=1) for x in self.inputs),
            self.limit,
        )

    def lengthened(self, times: int) -> Traced:
        """Return the trace of a forward on each sequence said so many times over."""
        return _traced(self.case, self.built, tuple(torch.cat([x] * times, dim=1) for x in self.inputs), self.limit)

    def repeated(self) -> Traced:
        """Return the trace of a forward on the first token of each sample, at every position."""
        return _traced(
            self.case, self.built, tuple(x[:, :1].expand_as(x).contiguous() for x in self.inputs), self.limit
        )


@dataclass(frozen=True)
class _Kept:
    """A trace that is read again.

    Attributes:
        module: the model.
        inputs: what it was called on.
        seen: the trace.
        reach: the sizes that it was called with, as in a tally.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    seen: Traced
    reach: Mapping[str, list[Any]]


def flow(case: Case, *, goes_far: bool = True) -> Flow:
    """Return a forward of the case's model in the widest dtype that it computes in, on drawn inputs.

    Args:
        case: whose model is called.
        goes_far: on as many positions as a case of many has; else on few of the same model.
    """
    built = case.built(dtype=judged_dtypes(case.bench)[-1])
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no torch module")
    if built.dtype not in _LIMITS:
        case.does_not_apply(f"in {built.dtype} parts cannot be told by their numbers")
    two = case.subject.kind in ("encoder_decoder", "cross_attention")
    longest = min(case.subject.fact("max_len", built.config.max_len), built.config.max_len)
    needed = FEWEST + two
    if longest < needed:
        case.does_not_apply(f"it takes {longest} positions, and {needed} are needed to tell parts by their numbers")
    is_long = goes_far and is_far(case)
    batch = FEW if is_long else BATCH
    # a window is seen by what lies beyond it
    wanted = max(LENGTH, case.subject.shortest, (case.subject.declares.get("window") or 0) + 3)
    length = min(case.length("T", low=FEWEST) if is_long else wanted, longest - two)
    tokens = _drawn(case, built, batch, length)
    inputs = _in_order(case, tokens, _drawn(case, built, batch, length + 1)) if two else (tokens,)
    limit = _LIMITS[built.dtype]
    return Flow(case, built, inputs, length, (length + 1) * two, limit, _traced(case, built, inputs, limit))


def flow_aside(case: Case) -> Flow:
    """Return a forward on few positions that explains a failure: what it is called with counts as judged by nobody."""
    kept, case.bench.tally = case.bench.tally, Tally()
    try:
        return flow(case, goes_far=False)
    finally:
        case.bench.tally = kept


def of_small_model(flowing: Flow) -> Flow | None:
    """Return a forward of the smallest model, to hold that of a wide one against; None where there is one size."""
    return of_other_sizes(flowing, flowing.case.bench.configs[0])


def of_other_sizes(flowing: Flow, sizes: DrawnConfig) -> Flow | None:
    """Return a forward of a model of other sizes; None where it cannot be built, or is the same."""
    case = flowing.case
    built = case.built_at(flowing.built.dtype, **asdict(sizes))
    if built is None or built.config == flowing.built.config:
        return None
    longest = min(case.subject.fact("max_len", sizes.max_len), sizes.max_len)
    length = min(max(LENGTH, case.subject.shortest), longest - 1)
    inputs: tuple[Tensor, ...] = (_drawn(case, built, BATCH, length),)
    if flowing.other:
        inputs = _in_order(case, inputs[0], _drawn(case, built, BATCH, length + 1))
    if case.subject.takes_tokens:
        inputs = tuple(tokens % sizes.vocab_size for tokens in inputs)
    seen = _traced(case, built, inputs, flowing.limit)
    return Flow(case, built, inputs, length, (length + 1) * bool(flowing.other), flowing.limit, seen)


def _in_order(case: Case, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sequences as the kind takes them: a source before, a memory behind."""
    return (own, other) if case.subject.kind == "cross_attention" else (other, own)


def is_far(case: Case) -> bool:
    """Whether a case is one of many positions."""
    return case.choices.get("reach") == LONG


def _drawn(case: Case, built: Built, batch: int, length: int) -> Tensor:
    if case.subject.takes_tokens:
        return case.tokens(batch, length)
    return case.normal(batch, length, built.config.d_model, dtype=built.dtype)


def _traced(case: Case, built: Built, inputs: tuple[Tensor, ...], limit: float) -> Traced:
    """Return the trace of a forward; the properties of one subject share the last ones, but for a script."""
    run: Callable[[], Any] = case.caller(built, *inputs)
    batch = len(inputs[0])
    if case.bench.recorder:
        taken: Traced = case.apply(traced, built.module, run, batch, limit)
        return taken
    where = ("anatomy", case.choices.get("reach"))  # those of drawn cases, which differ, leave the far ones in place
    kept: list[_Kept] = case.bench.measured.setdefault(where, [])
    for one in kept:
        if one.module is built.module and all(map(torch.equal, one.inputs, inputs)):
            case.bench.tally.note_all_reach(one.reach)  # who reads a trace has looked as far as it
            return one.seen
    own, case.bench.tally = case.bench.tally, Tally()
    try:
        found, reach = traced(built.module, run, batch, limit), case.bench.tally.reach
    finally:
        own.note_effort_of(case.bench.tally)
        case.bench.tally = own
    own.note_all_reach(reach)
    kept[:] = [*kept[-1:], _Kept(built.module, inputs, found, reach)]
    return found
