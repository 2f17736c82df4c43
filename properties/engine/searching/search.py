"""Looking for a case that violates a property: a sweep of colliding lengths, then Hypothesis, then shrinking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption

from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import (
    Draws,
    HypothesisDraws,
    RandomDraws,
    RecordedDraws,
    RejectedError,
    ReplayError,
)
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.searching.reaching import far_cases, wide_cases
from veriformer.properties.engine.searching.reproducible import alone
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation
from veriformer.properties.results.clocks import counted
from veriformer.properties.subject.palette import colliding_lengths

SHRINK_EXAMPLES = 200  # cases tried to make a failing one smaller: about a second on a small model

_GIVEN_UP = 100  # cases, when none was judged: what one case in thirty meets is missed once in thirty searches

_BEYOND = 20  # seeds tried for choices that a recorded case does not have: one in a few meets a premise


class _NotMetError(BaseException):
    """No case met the premise, and enough were drawn; no Exception, which Hypothesis would take for a failing case."""


@dataclass
class Found:
    """The smallest case that went wrong.

    Attributes:
        case: with its choices.
        problem: what it raised: a Violation, or another exception.
    """

    case: Case
    problem: BaseException


def _or_else(cause: Callable[[], str | None] | None, works: int, fails: int) -> str | None:
    """Return what a cause says, or at which length the failure begins."""
    told = None if cause is None else cause()
    return told or f"it begins with sequences of {fails}: at {works} it is not there"


class Search:
    """One property on one subject."""

    def __init__(self, prop: Property, bench: Workbench, *, shrink: bool = True) -> None:
        self.prop = prop
        self.bench = bench
        self.shrinks = shrink
        self.deadline = counted() + bench.settings.effort.property_seconds
        self.last: Case | None = None
        self._walks_all = False
        self._given_up = 0

    def run(self) -> Found | None:
        """Return the smallest failing case, or None.

        Raises:
            BudgetSpent: the time for the property is over and nothing had failed.
        """
        for fixed in self._sweep():
            try:
                self._judge(RandomDraws(self._seed(), fixed))
            except RejectedError:
                continue
            except Exception as problem:
                return self._shrink(problem, fixed)
        wanted = max(1, round(self.bench.settings.effort.examples * self.prop.examples_factor))
        drawn = max(wanted - self.bench.tally.examples, (wanted + 1) // 2)  # swept lengths are cases too
        return self._hypothesis(drawn, {}) or self._reach()

    def _reach(self) -> Found | None:
        """Cover what lies beyond the small sizes, as far as time allows."""
        sweeps = self.prop.sweeps_lengths
        far = far_cases(self.bench, self.prop.farthest, all_lengths=sweeps)
        for fixed in (*far, *wide_cases(self.bench)) if not sweeps else far:
            try:
                self._judge(RandomDraws(self._seed(), fixed))
            except RejectedError:
                continue
            except (BudgetSpent, SubjectTimeoutError):
                return None
            except Exception as problem:
                assert self.last is not None
                self._walks_all = True
                found = Found(self.last, problem)
                return self._narrowed(found, fixed) if self.shrinks and "T" in fixed else found
        return None

    def _narrowed(self, found: Found, fixed: Mapping[str, Any]) -> Found:
        """Return the failure at the shortest length at which it is still there."""
        works, fails = 1, int(fixed["T"])
        while fails - works > 1:
            middle = (works + fails) // 2
            try:
                cut = {name: middle - 1 for name in ("t", "real") if name in fixed}
                self._judge(RandomDraws(self._seed(), {**fixed, "T": middle, **cut}))
            except RejectedError:
                works = middle
            except (BudgetSpent, SubjectTimeoutError):
                return found
            except Exception as problem:
                assert self.last is not None
                if type(problem) is type(found.problem):
                    found, fails = Found(self.last, problem), middle
                    continue
                works = middle
            else:
                works = middle
        if works > 1 and isinstance(found.problem, Violation):
            found.problem.cause = partial(_or_else, found.problem.cause, works, fails)
        return found

    def replay(self, choices: Mapping[str, Any]) -> Found | None:
        """Judge one recorded case, on every path.

        Raises:
            ReplayError: the record is none of a case of this property.
        """
        self._walks_all = True
        for seed in range(_BEYOND):
            try:
                self._judge(RecordedDraws(choices, seed))
            except ReplayError:
                raise
            except RejectedError:
                continue  # of what the record does not say; another choice of it may meet the premise
            except NotSpokenOfError as problem:
                self.bench.tally.given_up.add(str(problem))
            except Exception as problem:
                assert self.last is not None
                return Found(self.last, problem)
            return None
        return None

    def _seed(self) -> int:
        # an id of its own for every property: the cases of one do not depend on which others ran
        return self.bench.settings.seed * 1_000_003 + int.from_bytes(self.prop.id.encode()[-6:], "big")

    def _sweep(self) -> Iterator[dict[str, int]]:
        if not self.prop.sweeps_lengths:
            return
        for index, config in enumerate(self.bench.configs[: self.bench.settings.effort.sweep_configs]):
            for length in colliding_lengths(self.bench.subject, config):
                yield {"config": index, "T": length}

    def _judge(self, draws: Draws) -> None:
        if counted() > self.deadline:
            raise BudgetSpent
        self.last = Case(self.bench, draws, turn=0 if self._walks_all else self.bench.tally.examples)
        self.prop.check(self.last)
        self.bench.tally.examples += 1

    def _shrink(self, problem: Exception, fixed: Mapping[str, Any]) -> Found:
        assert self.last is not None
        found, self._walks_all = Found(self.last, problem), True
        if not self.shrinks:
            return found
        kept, self.bench.tally = self.bench.tally, Tally()
        try:
            smaller = self._hypothesis(SHRINK_EXAMPLES // 4, {}) or self._hypothesis(SHRINK_EXAMPLES // 4, fixed)
        except BudgetSpent:
            smaller = None
        finally:
            kept.examples += 1
            kept.note_worst_of(self.bench.tally)
            self.bench.tally = kept
        return smaller if smaller is not None and type(smaller.problem) is type(problem) else found

    def _hypothesis(self, examples: int, fixed: Mapping[str, Any]) -> Found | None:
        failed: list[Found] = []

        def judge(data: st.DataObject) -> None:
            try:
                self._judge(HypothesisDraws(data, fixed))
            except UnsatisfiedAssumption:
                self._given_up += 1
                if self._given_up >= _GIVEN_UP and not self.bench.tally.examples:
                    raise _NotMetError from None
                raise
            except (Violation, SubjectError) as problem:
                assert self.last is not None
                self._walks_all = True  # smaller cases, and the record, are judged on every path
                failed.append(Found(self.last, problem))
                raise

        run = hypothesis.seed(self._seed())(
            hypothesis.settings(
                max_examples=examples,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink) if self.shrinks else (Phase.generate,),
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                print_blob=False,
                verbosity=Verbosity.quiet,
            )(given(st.data())(judge))
        )
        try:
            with alone():
                run()
        except (Unsatisfiable, _NotMetError):
            return None  # every case was given up: no witness, so the engine calls it VACUOUS
        except (BudgetSpent, SubjectTimeoutError):
            if failed:
                return failed[-1]  # shrinking ran out of time: the last failing case is the smallest so far
            raise
        except Exception as problem:
            assert self.last is not None
            if not failed and counted() > self.deadline:
                raise BudgetSpent from problem  # Hypothesis calls a run that ends for want of time a flaky one
            return failed[-1] if failed else Found(self.last, problem)
        return None
