"""As far as a subject reaches: lengths and sizes beyond the small ones, covered one by one beside them.

Mistakes that begin at a length (a mask of a fixed size, a tile, a table that ends) or at a width, a head or a layer are
nowhere in small models. One sample and few paths are called here; a failing length is narrowed to the first that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.searching.costs import affords, effort_of, operations, operations_of_steps
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.subject.palette import LONG, WIDE, colliding_lengths

FARTHEST = 1025
_SHORTEST = 33
"""One past the longest of the small models."""

_FIRST = 3
"""So many of the shortest are chosen before the longest ones: most mistakes begin there."""


def far_cases(
    bench: Workbench, farthest: int, *, all_lengths: bool = True, steps: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield what is fixed of the cases that reach further, the longest first, then the wide one.

    Args:
        bench: of the subject.
        farthest: no length is longer.
        all_lengths: else the longest alone, and no wide one.
        steps: whether a case may call once for each position.
    """
    if bench.subject.kind not in SEQUENCES:
        return
    if not farthest:
        lengths = []
    elif all_lengths:
        lengths = far_lengths(bench, farthest, steps=steps)
    else:
        lengths = far_lengths(bench, farthest, steps=steps)[:1]
    for length in lengths:
        # cut before the last one, where tiles of any power of two end: no earlier position may see what begins there
        yield {"reach": LONG, "T": length, "B": 1, "t": length - 1, "real": length - 1}
    if all_lengths and bench.pool.reaching[WIDE] not in (bench.pool.reaching[LONG], *bench.configs):
        yield {"reach": WIDE, "T": 7}


def wide_cases(bench: Workbench) -> Iterator[dict[str, Any]]:
    """Yield one case of the wide model for a property that sweeps no lengths; in quick the sweeping ones see to it."""
    if bench.settings.profile != "quick" and bench.pool.reaching[WIDE] not in bench.configs:
        yield {"reach": WIDE}


def far_lengths(bench: Workbench, farthest: int, *, steps: bool = False) -> list[int]:
    """Return one past each power of two that the subject reaches, and the longest, as far as the effort allows."""
    return _planned(bench, min(reach_of(bench), farthest), steps)[0]


def planned_lengths(bench: Workbench, farthest: int, *, steps: bool = False) -> list[int]:
    """Return what `far_lengths` will give if the subject takes what it claims; nothing is tried."""
    return _planned(bench, min(_claimed(bench), farthest), steps)[0] if bench.subject.kind in SEQUENCES else []


def left_out(bench: Workbench, farthest: int, *, steps: bool = False) -> list[int]:
    """Return the lengths that a property would cover on a large instance if they cost less, shortest first."""
    if not bench.pool.is_large or bench.subject.kind not in SEQUENCES:
        return []
    found, missed = _planned(bench, min(_claimed(bench), farthest), steps)
    return sorted({*missed, *(n for n in _too_long_to_sweep(bench) if n not in found)})


def _too_long_to_sweep(bench: Workbench) -> list[int]:
    """Return the colliding lengths that are no longer drawn."""
    tokens, sizes = effort_of(bench).tokens, bench.pool.reaching[LONG]
    return [n for n in colliding_lengths(bench.subject, sizes) if tokens is not None and tokens < n <= sizes.max_len]


def _planned(bench: Workbench, longest: int, steps: bool) -> tuple[list[int], list[int]]:
    """Return the far lengths that the effort allows, and those that it does not, the longest first."""
    effort = effort_of(bench)
    lengths = {longest, *(2**n + 1 for n in range(5, 11))}
    lengths |= set(_too_long_to_sweep(bench))
    wanted = sorted(n for n in lengths if min(_SHORTEST, (effort.tokens or _SHORTEST) + 1) <= n <= longest)
    # the longest one of a large instance is where most can begin that small models do not show
    first = wanted[-1:] if bench.pool.is_large else wanted[:_FIRST]
    rest = wanted[:-1] if bench.pool.is_large else list(reversed(wanted[_FIRST:]))
    left, found = effort.far_operations, []
    for length in (*first, *rest):
        needed = operations_of_steps(bench, length) if steps and bench.pool.is_large else operations(bench, length)
        if needed <= left:
            left -= needed
            found.append(length)
    return sorted(found, reverse=True), sorted(set(wanted) - set(found), reverse=True)


def reach_of(bench: Workbench) -> int:
    """Return the longest sequence that the subject claims, and takes, of `FARTHEST` at most."""
    if ("reach",) not in bench.measured:
        bench.measured["reach",] = _reach_of(bench)
    longest: int = bench.measured["reach",]
    return longest


def _reach_of(bench: Workbench) -> int:
    claimed = _claimed(bench)
    if claimed < _SHORTEST or not affords(bench, claimed):
        return claimed
    try:
        case = Case(bench, RandomDraws(0, {"reach": LONG}))
        stream = Stream(case, case.built(dtype=torch.float32))
        with bench.trying(stream.built) as tried:
            return longest_taken(Stream(case, tried), claimed)
    except SubjectError:
        return 0


def _claimed(bench: Workbench) -> int:
    config = bench.pool.reaching[LONG]
    return min(config.max_len, int(bench.subject.fact("max_len", config.max_len)), FARTHEST)


def longest_taken(stream: Stream, claimed: int) -> int:
    """Return the longest sequence, of so many at most, that a subject takes; that length where it takes none at all."""
    kept, key = stream.case.bench.measured, ("longest taken", stream.built.config, claimed)
    if key not in kept:
        kept[key] = _longest_taken(stream, claimed)
    longest: int = kept[key]
    return longest


def _longest_taken(stream: Stream, claimed: int) -> int:
    if _takes(stream, claimed) or not _takes(stream, 2):
        return claimed
    works, raises = 2, claimed
    while raises - works > 1:
        middle = (works + raises) // 2
        works, raises = (middle, raises) if _takes(stream, middle) else (works, middle)
    return works


def _takes(stream: Stream, length: int) -> bool:
    try:
        with torch.no_grad():
            stream(stream.draw(1, length))
    except SubjectError:
        return False
    return True
