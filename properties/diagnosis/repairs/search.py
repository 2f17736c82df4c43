"""Which one change of the subject's code explains its failures: with it they hold, and nothing else is broken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from veriformer.properties.bench.guards import Allowance
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.repairs.aside import aside, at_once
from veriformer.properties.diagnosis.repairs.candidates import Failure, Repair, anew, candidates_of, case_of, judged
from veriformer.properties.diagnosis.repairs.weighing import GUARDS, Weighing
from veriformer.properties.diagnosis.rewriting.edits import SLIP, STATEMENT

_MOST = 2000
"""Changes that are tried: some seconds on a small model."""
_FAILURES = 8
"""Failures that are looked at together: what mends more of them explains more."""
_SEARCHES = 2
_SECONDS = 10.0
"""Of one search, of this thread's processor: small changes that were not all tried by then say nothing."""
_MENDED = (
    *GUARDS, "alibi.", "cross_attention.", "learned.", "position-bias.", "sinusoidal.", "instances.", "t5.",
    "gradients.gradcheck", "dropout.", "numerics.stateless", "numerics.grad-mode", "parameters.registered",
)  # fmt: skip
"""Properties of which a slip of a forward, or of `build`, may be what breaks them."""
_OWN_NUMBERS = ("tokenizer.",)
"""Properties that hold a subject to numbers of its own, its merges or scores: other numbers mend them as well."""
_DIFFERENCES = (
    "causality.declared-bidirectional-is", "padding.mask-matters", "positions.order-matters", "attention.attends",
    "parameters.all-used",
)  # fmt: skip
"""Properties that want a difference: whatever moves the output would do."""
_DEFINED = (
    "alibi.", "attention.definition", "attention.grouped-queries", "attention.mask-semantics", "attention.tiles",
    "causality.alignment", "decoding.sampling", "ffn.definition", "loss.", "masking.", "norm.statistics", "router.",
    "rotary.frequencies", "schedule.", "sinusoidal.", "softmax.", "t5.", "tokenizer.",
)  # fmt: skip
"""Properties that say what every number must be: of others, leaving out a term mends as much as what is meant."""

_OF_MASKS = ("causality.",)
"""Properties of which a wrong mask is mended where it is made as well as where it is used."""


def repairs_of(bench: Workbench, failures: Sequence[Failure]) -> dict[str, str]:
    """Say which one change of the subject's code mends failures, where this is so on one line alone, or on two.

    Args:
        bench: of the subject, its facts resolved.
        failures: of it; where all are questions, nothing is said: another answer would mend them.

    Returns:
        By the id of a property that the change mends, the sentence.
    """
    if bench.pool.is_large or bench.device.type != "cpu":
        return {}
    told: dict[str, str] = {}
    looked = [
        f
        for f in failures
        if f.prop.id.startswith(_MENDED) and f.prop.id not in _DIFFERENCES and not f.prop.id.startswith(_OWN_NUMBERS)
    ][:_FAILURES]
    costs = {f.prop.id: seconds for f in looked if (seconds := _seconds_of(bench, f)) is not None}
    looked = [f for f in looked if f.prop.id in costs]
    left = sorted((f for f in looked if not f.is_question), key=lambda f: costs[f.prop.id])
    for failure in left[:_SEARCHES]:
        if failure.prop.id not in told:
            told |= _searched(bench, [failure, *(f for f in looked if f is not failure)])
    return told


def _seconds_of(bench: Workbench, failure: Failure) -> float | None:
    """Return how long the failing case takes; None where it does not fail any more."""
    started = perf_counter()
    fails = judged(failure.prop, case_of(anew(bench), failure)) is False
    return perf_counter() - started if fails else None


def _searched(bench: Workbench, failures: Sequence[Failure]) -> dict[str, str]:
    """Return the sentence, by the id of each failure that the change mends: one that mends the first of them."""
    failure, weighing = failures[0], Weighing(bench, failures)
    most = STATEMENT if failure.prop.id.startswith(_DEFINED) else SLIP
    found = candidates_of(lambda: judged(failure.prop, case_of(anew(bench), failure)))
    candidates = sorted((r for r in found if r.rank <= most), key=lambda r: r.rank)[:_MOST]
    step = at_once()
    tried = aside([partial(_mending, weighing, candidates, first, step) for first in range(step)], 2 * _SECONDS)
    if None in tried:
        return {}
    # what was tried of a rank that was not ended says nothing: another of it may do as well
    ended = min(rank for rank, _ in tried)
    mending = [(n, candidates[n]) for n in sorted(n for _, ns in tried for n in ns) if candidates[n].rank < ended]
    numbers, mended = (aside([partial(weighing.best_of, mending)], 2 * _SECONDS)[0] if mending else None) or ([], [])
    if not numbers or _is_elsewhere(failure, [candidates[n] for n in numbers]):
        return {}
    return dict.fromkeys((failures[n].prop.id for n in mended), _told([candidates[n] for n in numbers]))


def _is_elsewhere(failure: Failure, found: list[Repair]) -> bool:
    """Whether changes of several lines would do, so that which is meant is not known: but where all are by one."""
    if failure.prop.id.startswith(_OF_MASKS) or all(r.by_one for r in found):
        return False
    return len({(r.file, r.number) for r in found}) > 1


def _mending(weighing: Weighing, candidates: list[Repair], first: int, step: int) -> tuple[int, list[int]]:
    """Return the rank that was not ended in time, and which of every so many candidates mend the failure."""
    allowance, failure = Allowance(_SECONDS), weighing.failure
    again = case_of(anew(weighing.bench), failure)
    judged(failure.prop, again)
    made, mends = again.bench.tally.comparisons, list[int]()
    for number in range(first, len(candidates), step):
        if allowance.is_spent:
            return candidates[number].rank, mends
        if weighing.mends(failure, candidates[number], made):
            mends.append(number)
    return STATEMENT + 1, mends


def _told(found: list[Repair]) -> str:
    lines: dict[tuple[str, int], list[str]] = {}
    for repair in found:
        lines.setdefault((repair.file, repair.number), []).append(repair.told)
    most = 2 if len(lines) == 1 else 1
    parts = [
        f"{' or '.join([*dict.fromkeys(told)][:most])} at {Path(file).name}:{number}"
        for (file, number), told in lines.items()
    ]
    return f"one change makes it right: {'; or '.join(parts)}"
