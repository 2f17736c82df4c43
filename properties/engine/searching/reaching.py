"""As far as a subject reaches: lengths and sizes beyond the small ones, covered one by one beside them.

Mistakes that begin at a length (a mask of a fixed size, a tile, a table that ends) or at a width, a head or a layer are
nowhere in small models. One sample and few paths are called here; a failing length is narrowed to the first that fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from veriformer.properties.bench.guards import SizesRefusedError, SubjectError, SubjectTimeoutError
from veriformer.properties.bench.measured import is_swamped, judged_dtypes
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import name_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.property import FARTHEST, Property
from veriformer.properties.engine.searching.costs import (
    affords,
    effort_of,
    loops_too_long,
    operations,
    operations_of_steps,
    too_costly,
    tries,
)
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.subject.claims import claims_of
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.palette import (
    CROWD,
    CROWDED,
    LARGEST,
    LONG,
    MOST_SAMPLES,
    ODD,
    WIDE,
    colliding_lengths,
)

_SHORTEST = 33
"""One past the longest of the small models."""

_WIDE_LENGTH, _FEW = 7, 2

_COMPARES_SAMPLES = ("batch", "padding")
"""Families that compare samples among others with the same alone, or in another order: they see many at once."""

_FIRST = 3
"""So many of the shortest are chosen before the longest ones: most mistakes begin there."""


def far_cases(bench: Workbench, prop: Property) -> Iterator[dict[str, Any]]:
    """Yield what is fixed of the cases of a property that reach further: the longest first, then the wide ones."""
    if bench.subject.kind not in SEQUENCES:
        return
    farthest = 0 if prop.goes_wide and bench.pool.is_large else prop.farthest  # all numbers of a forward are kept
    lengths = far_lengths(bench, farthest, steps=prop.steps) if farthest else []
    if prop.sweeps_lengths:
        _tell_left_out(bench, prop, max(lengths, default=0))
    for length in lengths if prop.sweeps_lengths else lengths[:1]:
        # cut before the last one, where tiles of any power of two end: no earlier position may see what begins there
        fixed: dict[str, Any] = {"reach": LONG, "T": length, "t": length - 1, "real": length - 1}
        yield fixed | ({"seed": 0} if prop.goes_wide else {})
    is_quick = bench.settings.profile == "quick"
    for name in wide_rows(bench, prop):
        fixed = {"reach": name, "B": MOST_SAMPLES if prop.goes_far or not is_quick else _FEW}
        fixed |= {"T": _WIDE_LENGTH} if prop.sweeps_lengths else {}
        fixed |= {"seed": 0} if prop.goes_wide else {}  # one forward, taken apart, serves all of those
        yield fixed | (_one_dtype(bench, name) if is_quick else {})
    if prop.family in _COMPARES_SAMPLES and not bench.pool.is_large:
        # an odd length: the numbers of real tokens of samples 2^n apart are other ones
        few = {"reach": CROWDED, "B": CROWD, "T": _WIDE_LENGTH}
        yield few | (_one_dtype(bench, CROWDED) if is_quick else {})


def _one_dtype(bench: Workbench, name: str) -> dict[str, str]:
    """Return what fixes the dtype of a wide model, so that in quick no other one is built and measured."""
    judged = judged_dtypes(bench)
    if len(judged) == 1 or is_swamped(bench, bench.pool.get(bench.pool.reaching[name], judged[0])):
        return {}
    return {"dtype": name_of(judged[0])}


def wide_rows(bench: Workbench, prop: Property) -> list[str]:
    """Return the names of the wide models that a property sees.

    In quick only where lengths are swept, or a property says so, the rarer rows one in a run where nothing ends the
    sweep, and of many layers where it goes deep; in standard every property sees one of these, and those see them all.
    Which one follows from the property and the seed.
    """
    settings, reaching = bench.settings, bench.pool.reaching
    if settings.profile == "quick" and not (prop.sweeps_lengths or prop.goes_wide):
        return []
    ends = [name for name in reaching if name == LARGEST and prop.goes_far]
    rows = [name for name in reaching if name not in (LONG, WIDE, LARGEST, CROWDED)]
    if settings.profile != "thorough" and not (prop.goes_far and settings.profile != "quick"):
        turn = zlib.crc32(prop.id.encode()) + settings.seed
        rows = rows[turn % len(rows) :][:1] if rows and (prop.goes_far or settings.profile != "quick") else []
    if prop.goes_wide and ODD in reaching and ODD not in rows:
        rows.append(ODD)
    if settings.profile == "quick" and not (prop.sweeps_lengths or prop.goes_deep):
        taken = [name for name in rows if is_taken(bench, name)]
        if taken:
            return taken
    is_another = reaching[WIDE] not in (reaching[LONG], *bench.configs) and not _is_refused(bench, WIDE)
    if prop.goes_far:
        _tell_too_large(bench)
    return [WIDE] * is_another + [name for name in (*ends, *rows) if is_taken(bench, name)]


def _tell_too_large(bench: Workbench) -> None:
    """Note the sizes that a domain ends with, where a model of them is too large for a check."""
    for name, size in claims_of(bench.subject).items():
        if name != "T" and size > max(getattr(config, name) for config in bench.pool.reaching.values()):
            bench.tally.note_unreached(f"{name} {size} (too large for a check)")


def is_taken(bench: Workbench, name: str) -> bool:
    """Whether a model of the sizes of a row can be built and called; a right one may refuse an odd width, say."""
    if ("row", name) not in bench.measured:
        bench.measured["row", name] = _refusal(bench, name)
    told = bench.measured["row", name]
    if told:
        bench.tally.note_unreached(f"{name} (refused: {told})")
    return not told


def _is_refused(bench: Workbench, name: str) -> bool:
    """Whether a constructor says no to the sizes of a row; whatever else goes wrong there is a mistake."""
    if ("refused", name) not in bench.measured:
        try:
            bench.pool.get(bench.pool.reaching[name], torch.float32)
            bench.measured["refused", name] = ""
        except SizesRefusedError as problem:
            bench.measured["refused", name] = why(problem)
        except SubjectError:
            bench.measured["refused", name] = ""
    told = bench.measured["refused", name]
    if told:
        bench.tally.note_unreached(f"{name} (refused: {told})")
    return bool(told)


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


def far_lengths(bench: Workbench, farthest: int, *, steps: bool = False) -> list[int]:
    """Return one past each power of two that the subject reaches, and the longest, as far as the effort allows.

    Args:
        bench: of the subject.
        farthest: no length is longer; from `FARTHEST` on all that the subject reaches are.
        steps: whether a case may call once for each position.
    """
    return _planned(bench, _up_to(reach_of(bench), farthest), steps)[0]


def planned_lengths(bench: Workbench, farthest: int, *, steps: bool = False) -> list[int]:
    """Return what `far_lengths` will give if the subject takes what it claims; nothing is tried."""
    return _planned(bench, _up_to(tried_of(bench), farthest), steps)[0] if bench.subject.kind in SEQUENCES else []


def left_out(bench: Workbench, farthest: int, *, steps: bool = False) -> list[int]:
    """Return the lengths that a property would cover on a large instance if they cost less, shortest first."""
    if not bench.pool.is_large or bench.subject.kind not in SEQUENCES:
        return []
    found, missed = _planned(bench, _up_to(tried_of(bench), farthest), steps)
    return sorted({*missed, *(n for n in _too_long_to_sweep(bench) if n not in found)})


def _up_to(longest: int, farthest: int) -> int:
    return longest if farthest >= FARTHEST else min(longest, farthest)


def _too_long_to_sweep(bench: Workbench) -> list[int]:
    """Return the colliding lengths that are no longer drawn."""
    tokens, sizes = effort_of(bench).tokens, bench.pool.reaching[LONG]
    if tokens is None:
        return []
    return [n for n in colliding_lengths(bench.subject, sizes) if tokens < n <= sizes.max_len]


def _planned(bench: Workbench, longest: int, steps: bool) -> tuple[list[int], list[int]]:
    """Return the far lengths that the effort allows, and those that it does not, the longest first."""
    effort = effort_of(bench)
    lengths = {longest, *(2**n + 1 for n in range(5, longest.bit_length())), *_too_long_to_sweep(bench)}
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


def _tell_left_out(bench: Workbench, prop: Property, reached: int) -> None:
    """Note the lengths that a property speaks of and does not reach, with the reason."""
    if missed := left_out(bench, prop.farthest, steps=prop.steps):
        bench.tally.note_unreached(f"T={' '.join(map(str, missed))} ({too_costly(bench)})")
    if prop.goes_far and claimed_of(bench) not in missed and (told := _why_no_farther(bench, reached)):
        bench.tally.note_unreached(told)


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
    return f"T {claimed} ({too_costly(bench) if claimed <= _most(bench) else 'memory'})"


def _most(bench: Workbench) -> int:
    """Return the length up to which the long model was built; an instance is as it is."""
    return bench.pool.reaching[LONG].max_len


def tried_of(bench: Workbench) -> int:
    """Return the longest sequence that is tried: the claimed one, if one forward of it is within the effort."""
    claimed = min(claimed_of(bench), _most(bench))
    while claimed > _SHORTEST and loops_too_long(bench, claimed):
        claimed //= 2
    return claimed if claimed <= FARTHEST or tries(bench, claimed) else FARTHEST


def _reach_of(bench: Workbench) -> int:
    claimed = tried_of(bench)
    if claimed < _SHORTEST or (bench.pool.is_large and not affords(bench, 1, claimed)):
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
    kept, key = stream.case.bench.measured, ("longest taken", stream.built.config, claimed)
    if key not in kept:
        kept[key] = _longest_taken(stream, claimed)
    longest: int = kept[key]
    return longest


def _longest_taken(stream: Stream, claimed: int) -> int:
    shortest = max(2, stream.case.subject.shortest)
    if takes(stream, claimed) or not takes(stream, shortest):
        return claimed
    works, raises = shortest, claimed
    while raises - works > 1:
        middle = (works + raises) // 2
        works, raises = (middle, raises) if takes(stream, middle) else (works, middle)
    return works


def takes(stream: Stream, length: int) -> bool:
    """Whether a subject takes a sequence of some length; what it raises says no."""
    try:
        with torch.no_grad():
            stream(stream.draw(1, length))
    except SubjectError:
        return False
    except SubjectTimeoutError as problem:
        raise SubjectTimeoutError(f"{problem}, with sequences of {length}") from None
    return True
