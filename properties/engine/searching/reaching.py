"""As far as a subject reaches: lengths and sizes beyond the small ones, covered one by one beside them.

Mistakes that begin at a length (a mask of a fixed size, a tile, a table that ends) or at a width, a head or a layer are
nowhere in small models. One sample and few paths are called here; a failing length is narrowed to the first that fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError
from veriformer.properties.bench.measured import is_swamped, judged_dtypes
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import name_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.property import FARTHEST, Property
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.subject.claims import claims_of
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.palette import LARGEST, LONG, MOST_SAMPLES, WIDE
from veriformer.properties.subject.sizes import DrawnConfig

_SHORTEST = 33
"""One past the longest of the small models."""

_WIDE_LENGTH, _FEW = 7, 2

_FIRST = 3
"""So many of the shortest are chosen before the longest ones: most mistakes begin there."""

_OPERATIONS = {"quick": 2e9, "standard": 2e10, "thorough": float("inf")}
"""Multiplications of the forwards of one property at its far lengths, all together: about a second in quick."""


def far_cases(bench: Workbench, prop: Property) -> Iterator[dict[str, Any]]:
    """Yield what is fixed of the cases of a property that reach further: the longest first, then the wide ones."""
    if bench.subject.kind not in SEQUENCES:
        return
    lengths = far_lengths(bench, prop.farthest) if prop.farthest else []
    for length in lengths if prop.sweeps_lengths else lengths[:1]:
        # cut before the last one, where tiles of any power of two end: no earlier position may see what begins there
        yield {"reach": LONG, "T": length, "t": length - 1, "real": length - 1}
    is_quick = bench.settings.profile == "quick"
    for name in wide_rows(bench, prop):
        fixed: dict[str, Any] = {"reach": name, "B": MOST_SAMPLES if prop.goes_far or not is_quick else _FEW}
        fixed |= {"T": _WIDE_LENGTH} if prop.sweeps_lengths else {}
        yield fixed | (_one_dtype(bench, name) if is_quick else {})


def _one_dtype(bench: Workbench, name: str) -> dict[str, str]:
    """Return what fixes the dtype of a wide model, so that in quick no other one is built and measured."""
    judged = judged_dtypes(bench)
    if len(judged) == 1 or is_swamped(bench, bench.pool.get(bench.pool.reaching[name], judged[0])):
        return {}
    return {"dtype": name_of(judged[0])}


def wide_rows(bench: Workbench, prop: Property) -> list[str]:
    """Return the names of the wide models that a property sees.

    In quick only where lengths are swept, the rarer rows one in a run where nothing ends the sweep; in standard every
    property sees one of these, and those see them all. Which one follows from the property and the seed.
    """
    settings, reaching = bench.settings, bench.pool.reaching
    if settings.profile == "quick" and not prop.sweeps_lengths:
        return []
    ends = [name for name in reaching if name == LARGEST and prop.goes_far]
    rows = [name for name in reaching if name not in (LONG, WIDE, LARGEST)]
    if settings.profile != "thorough" and not (prop.goes_far and settings.profile != "quick"):
        turn = zlib.crc32(prop.id.encode()) + settings.seed
        rows = rows[turn % len(rows) :][:1] if rows and (prop.goes_far or settings.profile != "quick") else []
    is_another = reaching[WIDE] not in (reaching[LONG], *bench.configs)
    if prop.goes_far:
        _tell_too_large(bench)
    return [WIDE] * is_another + [name for name in (*ends, *rows) if is_taken(bench, name)]


def _tell_too_large(bench: Workbench) -> None:
    """Note the sizes that a domain ends with, where a model of them is too large for a check."""
    for name, size in claims_of(bench.subject).items():
        if name != "T" and size > max(getattr(config, name) for config in bench.pool.reaching.values()):
            bench.tally.note_reach({"not reached": f"{name} {size} (time)"})


def is_taken(bench: Workbench, name: str) -> bool:
    """Whether a model of the sizes of a row can be built and called; a right one may refuse an odd width, say."""
    if ("row", name) not in bench.measured:
        bench.measured["row", name] = _refusal(bench, name)
    told = bench.measured["row", name]
    if told:
        bench.tally.note_reach({"not reached": f"{name} (refused: {told})"})
    return not told


def _refusal(bench: Workbench, name: str) -> str:
    try:
        built = bench.pool.get(bench.pool.reaching[name], torch.float32)
        inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(0), torch.float32)
        with torch.no_grad():
            bench.forward(built, *[x.to(bench.device) for x in inputs.tensors], *inputs.extras)
    except SubjectError as problem:
        return why(problem)
    return ""


def why(problem: SubjectError) -> str:
    """Return in a few words what a subject raised for sizes that it does not take."""
    return str(problem).partition(" (for ")[0][:160]


def far_lengths(bench: Workbench, farthest: int) -> list[int]:
    """Return one past each power of two that the subject reaches, and the longest, as far as the effort allows.

    Args:
        bench: of the subject.
        farthest: no length is longer; from `FARTHEST` on all that the subject reaches are.
    """
    longest = reach_of(bench) if farthest >= FARTHEST else min(reach_of(bench), farthest)
    powers = (2**n + 1 for n in range(5, longest.bit_length()))
    wanted = sorted(n for n in {longest, *powers} if _SHORTEST <= n <= longest)
    left, found = _OPERATIONS[bench.settings.profile], []
    for length in (*wanted[:_FIRST], *reversed(wanted[_FIRST:])):
        needed = _operations(bench, length)
        if needed <= left:
            left -= needed
            found.append(length)
    if farthest >= FARTHEST and (told := _why_no_farther(bench, max(found, default=0))):
        bench.tally.note_reach({"not reached": told})
    return sorted(found, reverse=True)


def affords(bench: Workbench, calls: int, length: int) -> bool:
    """Whether so many forwards of one sequence fit into the effort of the profile."""
    return calls * _operations(bench, length) <= _OPERATIONS[bench.settings.profile]


def claimed_of(bench: Workbench) -> int:
    """Return the longest sequence that the subject is said to take: declared, or in the sizes of an instance."""
    config = bench.pool.reaching[LONG]
    declared = bench.subject.fact("max_len")
    if bench.subject.build is None:
        return min(config.max_len, declared or config.max_len)
    return int(declared or min(config.max_len, FARTHEST))


def reach_of(bench: Workbench) -> int:
    """Return the longest sequence that the subject claims, and takes, `FARTHEST` at most where longer cost too much.

    Raises:
        SubjectTimeoutError: a call with such a sequence took too long; it is made once.
    """
    if ("reach",) not in bench.measured:
        kept, bench.tally = bench.tally, Tally()  # lengths tried here are none that the first to ask has judged
        try:
            bench.measured["reach",] = _reach_of(bench)
        except SubjectTimeoutError as problem:
            bench.measured["reach",] = str(problem)
        finally:
            bench.tally = kept
    longest: int | str = bench.measured["reach",]
    if isinstance(longest, str):
        raise SubjectTimeoutError(longest)
    return longest


def refused_beyond(bench: Workbench) -> int:
    """Return the longest sequence that is taken where a claimed one was tried and is refused; 0 where it is taken."""
    takes = reach_of(bench)
    return takes if takes < tried_of(bench) else 0


def _why_no_farther(bench: Workbench, reached: int) -> str:
    """Return what a subject claims and was not reached, with the reason; empty where all of it was."""
    claimed = claimed_of(bench)
    if reached >= claimed or claimed < _SHORTEST:
        return ""
    if takes := refused_beyond(bench):
        return f"T {claimed} (refused beyond {takes})"
    return (
        f"T {claimed} (time: --profile thorough goes farther)" if claimed <= _most(bench) else f"T {claimed} (memory)"
    )


def _most(bench: Workbench) -> int:
    """Return the length up to which the long model was built; an instance is as it is."""
    return bench.pool.reaching[LONG].max_len


def tried_of(bench: Workbench) -> int:
    """Return the longest sequence that is tried: the claimed one, if one forward of it is within the effort."""
    claimed = min(claimed_of(bench), _most(bench))
    return claimed if claimed <= FARTHEST or affords(bench, 1, claimed) else FARTHEST


def _reach_of(bench: Workbench) -> int:
    claimed = tried_of(bench)
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
    except SubjectTimeoutError as problem:
        raise SubjectTimeoutError(f"{problem}, with sequences of {length}") from None
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
