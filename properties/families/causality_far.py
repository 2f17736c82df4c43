"""A declared window in long sequences, where kernels look at blocks of keys; part of `causality.window`."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.subject.paths import Path

_REPLACED = 9
"""Inputs that are replaced one by one: at distances that are no multiples of a block."""

_TRIES = 3
"""Draws before an output counts as one that an input does not reach: a weight may underflow, or round to nothing."""

_WAY = Path(mode="no_grad")


def the_window_slides(case: Case, stream: Stream, allowed: Tensor) -> None:
    """Require that some inputs of a long sequence reach the outputs which may see them, and no others.

    Args:
        case: of `causality.window`.
        stream: a model for long sequences.
        allowed: `[T, T]`, what output t may see.
    """
    length = len(allowed)
    places = sorted({n * (length - 1) // (_REPLACED - 1) for n in range(_REPLACED)})
    may, moved = allowed[:, places], torch.zeros(length, len(places), dtype=torch.bool)
    for _ in range(_TRIES):
        moved |= _moved(stream, length, places)
        leaks, gaps = moved & ~may, may & ~moved
        if not bool(gaps.any()):
            break
    case.path = str(_WAY)
    case.require(
        ~leaks.any(),
        "an output depends on an input outside its window",
        got=_told(leaks, places),
        expected="no influence from there",
        cause=lambda: _span(leaks, places),
    )
    if not case.is_in_half and not case.subject.fact("sparse"):
        case.require(
            ~gaps.any(),
            "an output does not depend on an input inside its window",
            got=_told(gaps, places),
            expected="some influence from there",
            cause=lambda: _span(gaps, places),
        )
    case.path = ""


def _moved(stream: Stream, length: int, places: list[int]) -> Tensor:
    """Return `[T, N]`: which outputs change when the inputs at N places are replaced one by one."""
    x = stream.draw(1, length)
    other, before = stream.other(x), stream(x, path=_WAY)
    columns = []
    for place in places:
        changed = x.clone()
        changed[:, place] = other[:, place]
        columns.append((stream(changed, path=_WAY) != before).flatten(2).any(-1)[0].cpu())
    return torch.stack(columns, 1)


def _told(wrong: Tensor, places: list[int]) -> str:
    if not bool(wrong.any()):
        return ""
    t, column = (int(n) for n in wrong.nonzero()[0])
    return f"so at {int(wrong.sum())} of {wrong.numel()} places, first from input {places[column]} to output {t}"


def _span(wrong: Tensor, places: list[int]) -> str:
    """Say at which distances it is wrong, and whether at all of these."""
    steps = sorted({int(t) - places[int(column)] for t, column in wrong.nonzero()})
    here = {(int(t), int(column)) for t, column in wrong.nonzero()}
    always = all(
        (place + step, column) in here
        for step in steps for column, place in enumerate(places) if 0 <= place + step < len(wrong)
    )  # fmt: skip
    span = f"{steps[0]} to {steps[-1]} steps back" if steps[-1] > steps[0] else f"{steps[0]} steps back"
    if always:
        return f"it is so for every output, {span}"
    return f"it is so for some outputs alone, {span}: what is seen depends on where in a block of keys a query stands"
