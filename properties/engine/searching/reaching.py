"""As far as a subject reaches: lengths and sizes beyond the small ones, covered one by one beside them.

Mistakes that begin at a length (a mask of a fixed size, a tile, a table that ends) or at a width, a head or a layer are
nowhere in small models. One sample and few paths are called here; a failing length is narrowed to the first that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.subject.palette import LONG, WIDE
from veriformer.properties.subject.sizes import DrawnConfig

FARTHEST = 1025
_SHORTEST = 33
"""One past the longest of the small models."""

_FIRST = 3
"""So many of the shortest are chosen before the longest ones: most mistakes begin there."""

_OPERATIONS = {"quick": 2e9, "standard": 2e10, "thorough": float("inf")}
"""Multiplications of the forwards of one property at its far lengths, all together: about a second in quick."""


def far_cases(bench: Workbench, farthest: int, *, all_lengths: bool = True) -> Iterator[dict[str, Any]]:
    """Yield what is fixed of the cases that reach further, the longest first, then the wide one.

    Args:
        bench: of the subject.
        farthest: no length is longer.
        all_lengths: else the longest alone, and no wide one.
    """
    if bench.subject.kind not in SEQUENCES:
        return
    if not farthest:
        lengths = []
    elif all_lengths:
        lengths = far_lengths(bench, farthest)
    else:
        lengths = far_lengths(bench, farthest)[:1]
    for length in lengths:
        # cut before the last one, where tiles of any power of two end: no earlier position may see what begins there
        yield {"reach": LONG, "T": length, "B": 1, "t": length - 1, "real": length - 1}
    if all_lengths and bench.pool.reaching[WIDE] not in (bench.pool.reaching[LONG], *bench.configs):
        yield {"reach": WIDE, "T": 7}


def wide_cases(bench: Workbench) -> Iterator[dict[str, Any]]:
    """Yield one case of the wide model for a property that sweeps no lengths; in quick the sweeping ones see to it."""
    if bench.settings.profile != "quick" and bench.pool.reaching[WIDE] not in bench.configs:
        yield {"reach": WIDE}


def far_lengths(bench: Workbench, farthest: int) -> list[int]:
    """Return one past each power of two that the subject reaches, and the longest, as far as the effort allows."""
    longest = min(reach_of(bench), farthest)
    wanted = sorted(n for n in {longest, *(2**n + 1 for n in range(5, 11))} if _SHORTEST <= n <= longest)
    left, found = _OPERATIONS[bench.settings.profile], []
    for length in (*wanted[:_FIRST], *reversed(wanted[_FIRST:])):
        needed = _operations(bench, length)
        if needed <= left:
            left -= needed
            found.append(length)
    return sorted(found, reverse=True)


def reach_of(bench: Workbench) -> int:
    """Return the longest sequence that the subject claims, and takes, of `FARTHEST` at most."""
    if ("reach",) not in bench.measured:
        kept, bench.tally = bench.tally, Tally()  # lengths tried here are none that the first to ask has judged
        try:
            bench.measured["reach",] = _reach_of(bench)
        finally:
            bench.tally = kept
    longest: int = bench.measured["reach",]
    return longest


def _reach_of(bench: Workbench) -> int:
    config = bench.pool.reaching[LONG]
    claimed = min(config.max_len, int(bench.subject.fact("max_len", config.max_len)), FARTHEST)
    if claimed < _SHORTEST:
        return claimed
    try:
        case = Case(bench, RandomDraws(0, {"reach": LONG}))
        stream = Stream(case, case.built(dtype=torch.float32))
        with bench.trying(stream.built) as tried:
            return longest_taken(Stream(case, tried), claimed)
    except SubjectError:
        return 0


def longest_taken(stream: Stream, claimed: int) -> int:
    """Return the longest sequence, of so many at most, that a subject takes; that length where it takes none at all."""
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


def _operations(bench: Workbench, length: int) -> float:
    """Estimate the multiplications of one forward of one sequence."""
    config: DrawnConfig = bench.pool.reaching[LONG]
    key = ("parameters of the long model",)
    if key not in bench.measured:
        module = bench.pool.get(config, torch.float32).module
        bench.measured[key] = sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0
    # a score costs a product of d_model channels and about a dozen steps of its softmax in each head
    scores = config.num_layers * length**2 * (2 * config.d_model + 12 * config.num_heads)
    return float(bench.measured[key] * length + scores)
