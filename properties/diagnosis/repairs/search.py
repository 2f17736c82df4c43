"""Which one change of the subject's code explains its failures: with it they hold, and nothing else is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

from veriformer.properties.bench.guards import Allowance, SubjectTimeoutError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.causes.tracing.lines import text_of
from veriformer.properties.diagnosis.repairs.aside import aside, at_once
from veriformer.properties.diagnosis.repairs.mending import Mended, sites_of
from veriformer.properties.diagnosis.repairs.moved import moved_by
from veriformer.properties.diagnosis.rewriting.edits import SLIP, STATEMENT
from veriformer.properties.diagnosis.rewriting.executed import lines_of
from veriformer.properties.diagnosis.rewriting.rewritten import Rewriting, rewritings_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws, RecordedDraws, RejectedError, ReplayError
from veriformer.properties.engine.property import Property, registered
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation

_MOST = 2000
"""Changes that are tried: some seconds on a small model."""
_MORE = 10
"""Cases drawn anew under which what mends the one that failed must hold too."""
_FEWEST = 3
_LINES = 2
"""Lines that may be named together: where two must agree, either may be the one that is wrong."""
_NAMED = 2
"""Changes of one line that are told."""
_SURVIVORS = 24
_SEEDS = (0, 1)
_FAILURES = 8
"""Failures that are looked at together: what mends more of them explains more."""
_SEARCHES = 2
_SECONDS = 10.0
"""Of one search, of this thread's processor: small changes that were not all tried by then say nothing."""
_CALL_SECONDS = 2.0
"""Of one call of what a change may have made endless."""
_GUARDS = (
    "numerics.finite", "attention.", "causality.", "padding.", "batch.", "permutation.", "positions.", "anatomy.",
    "residual.", "decoding.", "layer.", "rotary.", "norm.", "ffn.", "embedding.", "parameters.all-used", "loss.",
    "schedule.", "masking.", "tokenizer.", "router.", "twin.", "softmax.", "dropout.eval",
)  # fmt: skip
"""Properties that held before and must hold still: a line that makes all outputs one mends much, and breaks these."""
_MENDED = (
    *_GUARDS, "alibi.", "cross_attention.", "learned.", "position-bias.", "sinusoidal.", "instances.", "t5.",
    "gradients.gradcheck", "dropout.", "numerics.stateless", "numerics.grad-mode",
    "parameters.registered",
)  # fmt: skip
"""Properties of which a slip of a forward, or of `build`, may be what breaks them."""
_DIFFERENCES = (
    "causality.declared-bidirectional-is", "padding.mask-matters", "positions.order-matters", "attention.attends",
    "parameters.all-used",
)  # fmt: skip
"""Properties that want a difference: whatever moves the output would do."""
_RELATIONS = ("batch.", "causality.", "decoding.", "instances.", "numerics.", "padding.", "permutation.", "positions.")
"""Properties of which one short sequence by itself shows nothing: what mends them leaves some of it as it was."""
_OF_BACKWARDS = ("gradients.", "dropout.gradient")
_HALVES = ("float16", "bfloat16")
_KNOWN = ("tolerance", "floor", "first floor", "float64", "narrow constants")


@dataclass(frozen=True)
class Failure:
    """What is to be explained.

    Attributes:
        prop: what failed.
        choices: of its smallest failing case.
        is_question: whether it may be by design.
    """

    prop: Property
    choices: Mapping[str, Any]
    is_question: bool = False


@dataclass(frozen=True)
class Repair:
    """One change of what is computed on one line.

    Attributes:
        file: of the line.
        number: of the line.
        told: the change, in words behind "one change makes it right: ".
        rank: how much is changed; 0 is least.
        made: makes the change for a while.
    """

    file: str
    number: int
    told: str
    rank: int
    made: Callable[[], AbstractContextManager[Any]]


def repairs_of(bench: Workbench, failures: Sequence[Failure]) -> dict[str, str]:
    """Say which one change of the subject's code mends failures, where this is so on one line alone, or on two.

    Args:
        bench: of the subject, its facts resolved.
        failures: of it, those first that are no questions.

    Returns:
        By the id of a property that the change mends, the sentence.
    """
    if bench.pool.is_large or bench.device.type != "cpu":
        return {}
    told: dict[str, str] = {}
    looked = [f for f in failures if f.prop.id.startswith(_MENDED) and f.prop.id not in _DIFFERENCES][:_FAILURES]
    costs = {f.prop.id: seconds for f in looked if (seconds := _seconds_of(bench, f)) is not None}
    looked = [f for f in looked if f.prop.id in costs]
    for _ in range(_SEARCHES):
        left = [f for f in looked if f.prop.id not in told]
        if not left:
            break
        cheapest = min(left, key=lambda f: (f.is_question, costs[f.prop.id]))
        sentence, mended = _Searching(bench, cheapest, left).run()
        told |= dict.fromkeys(mended, sentence)
        looked.remove(cheapest)
    return told


def _seconds_of(bench: Workbench, failure: Failure) -> float | None:
    """Return how long the failing case takes; None where it does not fail any more."""
    started = perf_counter()
    fails = _judge(failure.prop, _case(_anew(bench), failure)) is False
    return perf_counter() - started if fails else None


class _Searching:
    """One search: for what mends one failure and all others, breaks nothing, and moves least else."""

    def __init__(self, bench: Workbench, failure: Failure, all_of_them: Sequence[Failure]) -> None:
        self.bench, self.failure = bench, failure
        self.failures = [failure, *(f for f in all_of_them if f is not failure)]
        self.others = [
            p
            for name, p in registered().items()
            if name.startswith(_GUARDS) and not p.costly and not p.why_not(bench.subject)
            and name not in {f.prop.id for f in self.failures}
        ]  # fmt: skip

    def run(self) -> tuple[str, list[str]]:
        """Return the sentence, and the ids of the properties that the change mends; nothing where none is the one."""
        candidates = sorted(self._candidates(), key=lambda r: r.rank)[:_MOST]
        step = at_once()
        tried = aside([partial(self._mending, candidates, first, step) for first in range(step)], 2 * _SECONDS)
        if None in tried:
            return "", []
        # what was tried of a rank that was not ended says nothing: another of it may do as well
        ended = min(rank for rank, _ in tried)
        mends = sorted(n for _, numbers in tried for n in numbers if candidates[n].rank < ended)
        best = aside([partial(self._best, candidates, mends)], 2 * _SECONDS)[0] if mends else None
        numbers, mended = best or ([], [])
        repairs = [candidates[number] for number in numbers]
        if not repairs or len({(r.file, r.number) for r in repairs}) > _LINES:
            return "", []
        return _told(repairs), [self.failures[n].prop.id for n in mended]

    def _candidates(self) -> Iterator[Repair]:
        """Yield what may be changed: of the source, and behind single calls.

        For a question, what is another slip alone: leaving a thing out answers whether it should be there.
        """
        for rewriting in rewritings_of(self._walk):
            edit = rewriting.edit
            if self.failure.is_question and edit.rank > SLIP:
                continue
            yield Repair(rewriting.file, edit.line, _words(rewriting), edit.rank, rewriting.made)
        for site, slips in sites_of(self._walk).items():
            for slip in slips:
                line = text_of(site.file, site.number)
                yield Repair(site.file, site.number, f"{slip.told} in `{line}`", 1, partial(Mended, site, slip))

    def _walk(self) -> None:
        _judge(self.failure.prop, _case(_anew(self.bench), self.failure))

    def _best(self, candidates: list[Repair], mends: list[int]) -> tuple[list[int], list[int]]:
        """Return which candidates are as good as any, and which failures they mend."""
        mends = [n for n in mends if self._explains(candidates[n])]
        mends = [n for n in mends if self._holds_elsewhere(candidates[n])][:_SURVIVORS]
        moved = {n: round(moved_by(self.bench, lambda: _anew(self.bench), candidates[n].made), 6) for n in mends}
        moved = {n: share for n, share in moved.items() if share <= self._most_moved}
        before = self._held() if moved else []
        for _, group in groupby(sorted(moved, key=lambda n: (moved[n], candidates[n].rank, n)),
                                key=lambda n: (moved[n], candidates[n].rank)):  # fmt: skip
            held: dict[tuple[str, int], list[int]] = {}
            for n in group:
                repair = candidates[n]
                if len(on_line := held.setdefault((repair.file, repair.number), [])) < _NAMED and self._hold_still(
                    repair, before
                ):
                    on_line.append(n)
            if best := [n for numbers in held.values() for n in numbers]:
                return best, self._mended_by(candidates[best[0]])
        return [], []

    @property
    def _most_moved(self) -> float:
        """The share of ordinary calls that may give something else."""
        if self.failure.prop.id.startswith(_OF_BACKWARDS) or self.failure.choices.get("dtype") in _HALVES:
            return 0.0
        return 0.99 if self.failure.prop.id.startswith(_RELATIONS) else 1.0

    def _mending(self, candidates: list[Repair], first: int, step: int) -> tuple[int, list[int]]:
        """Return the rank that was not ended in time, and which of every so many candidates mend the failure."""
        allowance = Allowance(_SECONDS)
        again = _case(_anew(self.bench), self.failure)
        _judge(self.failure.prop, again)
        made, mends = again.bench.tally.comparisons, list[int]()
        for number in range(first, len(candidates), step):
            if allowance.is_spent:
                return candidates[number].rank, mends
            if self._mends(self.failure, candidates[number], made):
                mends.append(number)
        return STATEMENT + 1, mends

    def _mends(self, failure: Failure, repair: Repair, made: int) -> bool:
        """Whether a case that failed holds with a change, after as many comparisons: not for want of an output."""
        again = _case(_anew(self.bench), failure)
        with repair.made():
            return _judge(failure.prop, again) is True and again.bench.tally.comparisons >= made

    def _explains(self, repair: Repair) -> bool:
        """Whether it mends all that is no question, and goes through all that was gone through: it evades nothing."""
        if not all(self._mends(f, repair, 0) for f in self.failures if not f.is_question):
            return False
        before = lines_of(self._walk)
        with repair.made():
            return not {at for at in before - lines_of(self._walk) if at != (repair.file, repair.number)}

    def _mended_by(self, repair: Repair) -> list[int]:
        return [n for n, f in enumerate(self.failures) if n == 0 or self._mends(f, repair, 0)]

    def _holds_elsewhere(self, repair: Repair) -> bool:
        """Whether longer cases of the kind that failed hold too, and cases drawn anew."""
        with repair.made():
            bench = _anew(self.bench)
            for longer in _longer(self.failure):
                if _judge(self.failure.prop, _case(bench, longer)) is False:
                    return False
            outcomes = [_judge(self.failure.prop, Case(bench, RandomDraws(seed, {}))) for seed in range(_MORE)]
        return False not in outcomes and outcomes.count(True) >= _FEWEST

    def _held(self) -> list[tuple[Property, int]]:
        bench = _anew(self.bench)
        return [(p, seed) for p in self.others for seed in _SEEDS if _judge(p, Case(bench, RandomDraws(seed, {})))]

    def _hold_still(self, repair: Repair, before: list[tuple[Property, int]]) -> bool:
        with repair.made():
            bench = _anew(self.bench)
            return all(_judge(p, Case(bench, RandomDraws(seed, {}))) is not False for p, seed in before)


def _longer(failure: Failure) -> Iterator[Failure]:
    """Yield the failing case with longer sequences: what only makes room for its own length mends nothing."""
    length = failure.choices.get("T")
    if isinstance(length, int):
        yield from (
            Failure(failure.prop, {**failure.choices, "T": n}) for n in (length + 1, length + 2, 2 * length + 1)
        )


def _told(found: list[Repair]) -> str:
    lines: dict[tuple[str, int], list[str]] = {}
    for repair in found:
        lines.setdefault((repair.file, repair.number), []).append(repair.told)
    parts = [
        f"{' or '.join(dict.fromkeys(told))} at {Path(file).name}:{number}" for (file, number), told in lines.items()
    ]
    return f"one change makes it right: {'; or '.join(parts)}"


def _words(rewriting: Rewriting) -> str:
    edit = rewriting.edit
    shown, mended = (" ".join(text.split()) for text in (edit.shown, edit.mended))
    if edit.new == "pass":
        return f"without `{shown}`"
    if mended == "behind the next statement":
        return f"`{shown}` behind the statement that follows it"
    return f"`{mended}` in place of `{shown}`"


def _anew(bench: Workbench) -> Workbench:
    """Return the subject on a workbench of its own: its models are built anew; what rounding does to them is known."""
    settings = replace(bench.settings, call_seconds=min(bench.settings.call_seconds or _CALL_SECONDS, _CALL_SECONDS))
    other = Workbench(bench.subject, settings)
    other.measured = {key: value for key, value in bench.measured.items() if key[0] in _KNOWN}
    return other


def _case(bench: Workbench, failure: Failure) -> Case:
    return Case(bench, RecordedDraws(failure.choices))


def _judge(prop: Property, case: Case) -> bool | None:
    """Judge a case: whether it holds; None where it speaks of nothing."""
    case.bench.tally = Tally()
    try:
        prop.check(case)
    except (RejectedError, NotSpokenOfError, ReplayError):
        return None
    except (Violation, SubjectTimeoutError, BudgetSpent, Exception):
        return False
    return True
