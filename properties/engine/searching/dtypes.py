"""Which dtypes are covered: float32 and float64 in turns, half precision one by one where a property holds in it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from veriformer.properties.bench.measured import is_swamped, judged_dtypes
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import HALVES, name_of
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.searching.costs import affords, too_costly
from veriformer.properties.engine.searching.reaching import reach_of
from veriformer.properties.engine.stream import SEQUENCES
from veriformer.properties.subject.inputs import has_ordinary_inputs
from veriformer.properties.subject.palette import LONG
from veriformer.properties.subject.sizes import DrawnConfig

_LENGTH = 7

_COLLIDING = 258
"""Positions 256 and 257 are one number in bfloat16, whose numbers have eight bits: the first two that are."""

_MOSTLY_PADDING = 41
"""Length of a batch in which one sample has two real tokens: a window of some radius holds none of them."""

_CALLS = 12
"""Forwards of a case, about, with those that its tolerance is measured by."""


def in_turns(bench: Workbench, config: DrawnConfig) -> Iterator[dict[str, Any]]:
    """Yield, for ever, what fixes the dtype of one case after another; nothing where it had better be drawn."""
    names = [name_of(dtype) for dtype in judged_dtypes(bench)]
    is_no_turn = len(names) == 1 or bench.spares_float64 or bench.settings.dtypes
    is_drawn = is_no_turn or not has_ordinary_inputs(bench.subject.kind)
    if is_drawn or is_swamped(bench, bench.pool.get(config, judged_dtypes(bench)[0])):
        return cycle([{}])
    return cycle([{"dtype": name} for name in names])


def half_cases(bench: Workbench, prop: Property) -> Iterator[dict[str, Any]]:
    """Yield what is fixed of the cases in half precision, for a property that is judged there too.

    Each in bfloat16 and in float16; in quick at the smallest size alone, and in one of the two, by turns, where long
    sequences are not looked at. And one of a sequence whose positions collide when they are counted in bfloat16, and
    one that is padding but for two tokens.
    """
    subject, settings = bench.subject, bench.settings
    if bench.pool.is_large:  # a copy in each; numerics.precision-ladder makes them
        return
    if not prop.in_half or subject.kind not in SEQUENCES or settings.dtypes or subject.fact("half_precision") is False:
        return
    known = [name_of(dtype) for dtype in judged_dtypes(bench)]
    halves = [name for name in HALVES if name not in known]
    configs = range(len(bench.configs) if settings.profile != "quick" else 1)
    if settings.profile == "quick" and not prop.goes_far:
        turn = zlib.crc32(prop.id.encode()) + settings.seed
        halves = halves[turn % max(len(halves), 1) :][:1]
    for name in halves:
        if not affords(bench, _CALLS, _LENGTH):
            bench.tally.note_unreached(f"{name} ({too_costly(bench)})")
            continue
        for index in configs:
            yield {"config": index, "T": _LENGTH, "dtype": name}
    # a causal mask compares positions; of a padding mask they may be counted, which one of ones shows
    compares = prop.goes_far and prop.family == "causality"
    reaches = (compares or prop.id == "padding.all-ones-mask") and reach_of(bench) >= _COLLIDING
    if "bfloat16" in halves and reaches and affords(bench, _CALLS, _COLLIDING):
        cut = _COLLIDING - 1
        yield {"reach": LONG, "T": _COLLIDING, "t": cut, "real": cut, "dtype": "bfloat16"}
    if prop.id == "padding.content-irrelevant" and reach_of(bench) >= _MOSTLY_PADDING:
        # queries whose window holds padding alone: a mask's constant may be -inf in half precision, and its row NaN
        for name in halves:
            if affords(bench, _CALLS, _MOSTLY_PADDING):
                yield {"reach": LONG, "T": _MOSTLY_PADDING, "real": 2, "dtype": name}
