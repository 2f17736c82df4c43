"""Whether a change that mends a failure is what was meant: it mends all, breaks nothing, evades nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.repairs.candidates import Failure, Repair, anew, case_of, judged
from veriformer.properties.diagnosis.repairs.ordinary_calls import Given, given_by
from veriformer.properties.diagnosis.rewriting.executed import lines_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RandomDraws
from veriformer.properties.engine.property import Property, registered
from veriformer.properties.engine.searching.search import Search
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError

_MORE = 10
"""Cases drawn anew under which what mends the one that failed must hold too."""
_FEWEST = 3
_SURVIVORS = 12
"""Changes that are weighed: of what so many would mend too little is known."""
_NAMED = 2
"""Changes of one line that are told."""
_LINES = 2
"""Lines that may be named together: where two must agree, either may be the one that is wrong."""
_SEEDS = (0, 1)
_AS_OFTEN = 0.8
"""Of the times that a line was gone through, or of those a call where there are fewer: other draws are other calls."""
GUARDS = (
    "numerics.finite", "attention.", "causality.", "padding.", "batch.", "permutation.", "positions.", "anatomy.",
    "residual.", "decoding.", "layer.", "rotary.", "norm.", "ffn.", "embedding.", "parameters.all-used", "loss.",
    "schedule.", "masking.", "tokenizer.", "router.", "twin.", "softmax.", "dropout.eval",
)  # fmt: skip
"""Properties that held before and must hold still: a line that makes all outputs one mends much, and breaks these."""
_RELATIONS = (
    "batch.", "causality.", "decoding.", "ffn.position-wise", "instances.", "norm.per-token", "numerics.", "padding.",
    "permutation.", "positions.",
)  # fmt: skip
"""Properties of several positions or samples: what mends them leaves some call as it was, of one position, say."""
_OF_BACKWARDS = ("gradients.", "dropout.gradient")
_HALVES = ("float16", "bfloat16")


class Weighing:
    """Weighs changes that mend one failure of a subject, in a process that ends with it."""

    def __init__(self, bench: Workbench, failures: Sequence[Failure]) -> None:
        """Prepare to weigh.

        Args:
            bench: of the subject.
            failures: of it; that which the changes mend first.
        """
        self.bench, self.failures = bench, failures
        self.failure, failed = failures[0], {f.prop.id for f in failures}
        self._blocked = [p for p in registered().values() if self._may_be_asked(p) and _requires(p, failed)]
        self._others = [
            p
            for name, p in registered().items()
            if name.startswith(GUARDS) and self._may_be_asked(p) and name not in failed and p not in self._blocked
        ]

    def best_of(self, mending: Sequence[tuple[int, Repair]]) -> tuple[list[int], list[int]]:
        """Return the numbers of those changes that may be told, and of the failures that they mend.

        None where those that are left do not all do the same: which is meant is not known then.

        Args:
            mending: changes that mend the first failure, with their numbers.
        """
        left = [(n, r) for n, r in mending if self._explains(r)]
        left = [(n, r) for n, r in left if self._holds_elsewhere(r)]
        if not left or len(left) > _SURVIVORS:
            return [], []
        given = {n: self._given(r) for n, r in left}
        left = [(n, r) for n, r in left if self._leaves_the_rest(given[n]) and self._breaks_nothing(r)]
        if still := [(n, r) for n, r in left if not given[n].other_than(self._as_it_is)]:
            # what leaves plain calls as they were is meant before what moves them, and of that what these do not reach
            plain = lines_of(lambda: given_by(anew(self.bench)))
            left = [(n, r) for n, r in still if (r.file, r.number) not in plain] or still
        if not left or any(given[n].other_than(given[left[0][0]]) for n, _ in left):
            return [], []
        rank = min(r.rank for _, r in left)
        lines: dict[tuple[str, int], list[int]] = {}
        for n, r in left:
            on_line = lines.setdefault((r.file, r.number), [])
            many = 1 if r.of_call else _NAMED  # what the source says in another way is not told twice
            if r.rank == rank and len(on_line) < many and self._passes(r):
                on_line.append(n)
        named = [numbers for numbers in lines.values() if numbers]
        if not named or len(named) > _LINES:
            return [], []
        first = next(r for n, r in left if n == named[0][0])
        mended = [n for n, f in enumerate(self.failures) if n == 0 or self.mends(f, first)]
        return [n for numbers in named for n in numbers], mended

    def _passes(self, repair: Repair) -> bool:
        """Whether all that failed is found no violation of, as thoroughly as it was looked for at first."""
        with repair.made():
            bench = anew(self.bench)
            return all(_finds_none(f.prop, bench) for f in self.failures if not f.is_question)

    def mends(self, failure: Failure, repair: Repair, comparisons: int = 0) -> bool:
        """Whether a case that failed holds with a change, after as many comparisons: not for want of an output."""
        again = case_of(anew(self.bench), failure)
        with repair.made():
            return judged(failure.prop, again) is True and again.bench.tally.comparisons >= comparisons

    def _may_be_asked(self, prop: Property) -> bool:
        return not prop.costly and not prop.why_not(self.bench.subject)

    def _explains(self, repair: Repair) -> bool:
        """Whether it mends all that is no question, and goes through every line as often: it evades nothing."""
        if not all(self.mends(f, repair) for f in self.failures if not f.is_question):
            return False
        with repair.made():
            after, calls = self._walked()
        before, least = self._lines[0], _AS_OFTEN * min(1, calls / self._lines[1])
        own = (repair.file, repair.number)
        return all(after[at] >= least * often for at, often in before.items() if at != own)

    @cached_property
    def _lines(self) -> tuple[Counter[tuple[str, int]], int]:
        return self._walked()

    def _walked(self) -> tuple[Counter[tuple[str, int]], int]:
        """Return how often the failing case goes through each line, and how many calls of the subject it makes."""
        case = case_of(anew(self.bench), self.failure)
        return lines_of(lambda: judged(self.failure.prop, case)), max(case.bench.tally.calls, 1)

    def _holds_elsewhere(self, repair: Repair) -> bool:
        """Whether longer cases of the kind that failed hold too, and cases drawn anew, and what the failure blocked."""
        with repair.made():
            bench = anew(self.bench)
            if any(judged(self.failure.prop, case_of(bench, longer)) is False for longer in _longer(self.failure)):
                return False
            outcomes = [judged(self.failure.prop, Case(bench, RandomDraws(seed, {}))) for seed in range(_MORE)]
            if False in outcomes or outcomes.count(True) < _FEWEST:
                return False
            return all(
                judged(p, Case(bench, RandomDraws(seed, {}))) is not False for p in self._blocked for seed in _SEEDS
            )

    def _given(self, repair: Repair) -> Given:
        with repair.made():
            return given_by(anew(self.bench))

    @cached_property
    def _as_it_is(self) -> Given:
        return given_by(anew(self.bench))

    def _leaves_the_rest(self, given: Given) -> bool:
        """Whether its parameters and the sizes of its parts are the same, and what it gives where nothing was wrong."""
        if given.parameters != self._as_it_is.parameters or not given.is_as_large(self._as_it_is):
            return False
        moved, name = given.other_than(self._as_it_is), self.failure.prop.id
        if name.startswith(_OF_BACKWARDS) or self.failure.choices.get("dtype") in _HALVES:
            return not moved
        return not name.startswith(_RELATIONS) or not moved or len(moved) < len(given.outputs)

    @cached_property
    def _held(self) -> list[tuple[Property, int]]:
        bench = anew(self.bench)
        return [(p, seed) for p in self._others for seed in _SEEDS if judged(p, Case(bench, RandomDraws(seed, {})))]

    def _breaks_nothing(self, repair: Repair) -> bool:
        held = self._held
        with repair.made():
            bench = anew(self.bench)
            return all(judged(p, Case(bench, RandomDraws(seed, {}))) is not False for p, seed in held)


def _finds_none(prop: Property, bench: Workbench) -> bool:
    bench.tally = Tally()
    try:
        return Search(prop, bench, shrink=False).run() is None
    except BudgetSpent:
        return True
    except (SubjectError, SubjectTimeoutError, NotSpokenOfError):
        return False


def _requires(prop: Property, failed: set[str]) -> bool:
    return any(name in failed or _requires(registered()[name], failed) for name in prop.requires)


def _longer(failure: Failure) -> Iterator[Failure]:
    """Yield the failing case with longer sequences: what only makes room for its own length mends nothing."""
    length = failure.choices.get("T")
    if isinstance(length, int):
        yield from (
            Failure(failure.prop, {**failure.choices, "T": n}) for n in (length + 1, length + 2, 2 * length + 1)
        )
