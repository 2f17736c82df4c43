"""Looking for a case that violates a property: a sweep of colliding lengths, then Hypothesis, then shrinking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption

from veriformer.properties.bench.guards import Allowance, SizesRefusedError, SubjectError, SubjectTimeoutError
from veriformer.properties.bench.profiles import FEWEST
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
from veriformer.properties.engine.searching.costs import effort_of
from veriformer.properties.engine.searching.dtypes import half_cases, in_turns
from veriformer.properties.engine.searching.reaching import far_cases, why
from veriformer.properties.engine.searching.reproducible import alone
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation
from veriformer.properties.subject.palette import CROWDED, LONG, WIDE, colliding_lengths

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


def _or_else(cause: Callable[[], str | None] | None, begins: str) -> str | None:
    """Return what a cause says, or at which size the failure begins."""
    told = None if cause is None else cause()
    return told or begins


def _sizes(fixed: Mapping[str, Any], name: str, value: int) -> dict[str, int]:
    """Return a size of a case, and what is cut before its last position."""
    return {name: value} | ({cut: value - 1 for cut in ("t", "real") if cut in fixed} if name == "T" else {})


def _with_dtype(cause: Callable[[], str | None] | None, dtype: str) -> str:
    """Return what a cause says, and that it is so in a dtype."""
    told = None if cause is None else cause()
    return f"{f'{told}; in {dtype}' if told else f'in {dtype} alone'}: the same case holds in float32"


def _words(fixed: Mapping[str, Any]) -> str:
    if fixed["reach"] == LONG:
        return f"sequences of {fixed['T']}"
    return "the wide model" if fixed["reach"] == WIDE else str(fixed["reach"])


_DATA = st.data()


@lru_cache
def _settings(examples: int, *, shrinks: bool) -> hypothesis.settings:
    """Return the settings of a search among so many examples."""
    return hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )


class Search:
    """One property on one subject."""

    def __init__(self, prop: Property, bench: Workbench, *, shrink: bool = True) -> None:
        self.prop = prop
        self.bench = bench
        self.shrinks = shrink
        self.effort = effort_of(bench)
        self.allowance = Allowance(self.effort.property_seconds)
        self.last: Case | None = None
        self._walks_all = False
        self._given_up = 0
        self._turn = 0

    def run(self) -> Found | None:
        """Return the smallest failing case, or None.

        Raises:
            BudgetSpent: the time for the property is over and nothing had failed.
        """
        for turn, fixed in enumerate(self._sweep()):
            self._turn = turn
            try:
                self._judge(RandomDraws(self._seed(), fixed))
            except RejectedError:
                continue
            except Exception as problem:
                return self._shrink(problem, fixed)
        wanted = max(1, round(self.effort.examples * self.prop.examples_factor))
        if self.prop.copies and self.bench.pool.is_large:
            wanted = min(wanted, FEWEST)
        drawn = max(wanted - self.bench.tally.examples, (wanted + 1) // 2)  # swept lengths are cases too
        return self._hypothesis(drawn, {}) or self._halve() or self._reach()

    def _halve(self) -> Found | None:
        """Cover half precision, of which a subject that refuses it is not asked (see numerics.precision-ladder)."""
        self._turn = 0
        for fixed in half_cases(self.bench, self.prop):
            try:
                self._judge(RandomDraws(self._seed(), fixed))
            except (RejectedError, SubjectError, NotSpokenOfError, RuntimeError):
                continue  # a RuntimeError is torch's in the backward
            except Violation as problem:
                assert self.last is not None
                self._walks_all = True
                far = self.shrinks and "reach" in fixed
                found = self._narrowed(Found(self.last, problem), fixed) if far else self._shrink(problem, fixed)
                self._tell_dtype(found)
                return found
        return None

    def _tell_dtype(self, found: Found) -> None:
        """Let the cause of a failure say that the dtype is, where the same case holds in float32."""
        if not found.case.is_in_half:
            return
        kept, self.bench.tally = self.bench.tally, Tally()
        try:
            self._judge(RandomDraws(self._seed(), {**found.case.choices, "dtype": "float32"}))
        except (Exception, BudgetSpent, SubjectTimeoutError, NotSpokenOfError):
            return
        finally:
            self.bench.tally = kept
        if isinstance(found.problem, Violation):
            found.problem.cause = partial(_with_dtype, found.problem.cause, found.case.choices["dtype"])

    def _reach(self) -> Found | None:
        """Cover what lies beyond the small sizes.

        Raises:
            BudgetSpent: before all of it was covered; says what was not.
            SubjectTimeoutError: a call took too long; says at which length. A large instance may be in time with a
                shorter one: there it is noted.
        """
        for turn, fixed in enumerate(far_cases(self.bench, self.prop)):
            self._turn = turn
            try:
                self._judge(RandomDraws(self._seed(), fixed))
            except RejectedError:
                continue
            except NotSpokenOfError as problem:
                if not self.bench.tally.witnesses:
                    raise
                # it speaks of the subject, as the small sizes showed, and cannot be told at this one
                self.bench.tally.note_unreached(f"{_words(fixed)} ({problem})")
            except BudgetSpent:
                raise BudgetSpent(f", before {_words(fixed)}") from None
            except SubjectTimeoutError as problem:
                if not self.bench.pool.is_large:
                    raise SubjectTimeoutError(f"{problem}, with {_words(fixed)}") from None
                self.bench.tally.note_unreached(f"T={fixed['T']} ({problem})")
                continue
            except Exception as problem:
                must_work = fixed["reach"] in (LONG, WIDE) and not isinstance(problem, SizesRefusedError)
                if isinstance(problem, SubjectError) and not must_work:
                    # what was called once may refuse a mask, or a cache, of such a size
                    self.bench.tally.note_unreached(f"{fixed['reach']} (refused: {why(problem)})")
                    continue
                assert self.last is not None
                self._walks_all = True
                found = Found(self.last, problem)
                return self._narrowed(found, fixed) if self.shrinks else found
        return None

    def _narrowed(self, found: Found, fixed: Mapping[str, Any]) -> Found:
        """Return the failure at the shortest length, and with the fewest samples, at which it is still there."""
        told, sizes = "", (("T", "sequences"), ("B", "batches"))
        for name, words in reversed(sizes) if fixed["reach"] == CROWDED else sizes:
            if name in fixed:
                found, works, least = self._least(found, fixed, name)
                fixed = {**fixed, **_sizes(fixed, name, least)}
                if not told and least > 2:  # one position, or sample, has nothing to be mixed with
                    at_most = "" if least == works + 1 else "at most "
                    told = f"it begins with {words} of {at_most}{least}: at {works} it is not there"
        if fixed["reach"] not in (LONG, CROWDED) and not told:
            told = f"no small model shows it, this one does ({fixed['reach']})"
        if told and isinstance(found.problem, Violation):
            found.problem.cause = partial(_or_else, found.problem.cause, told)
        return found

    def _least(self, found: Found, fixed: Mapping[str, Any], name: str) -> tuple[Found, int, int]:
        """Return the failure at the least value of a size at which it is there, one at which it is not, and that."""
        works, fails = 1, int(fixed[name])
        while fails - works > 1:
            middle = (works + fails) // 2
            try:
                self._judge(RandomDraws(self._seed(), {**fixed, **_sizes(fixed, name, middle)}))
            except RejectedError:
                works = middle
            except (BudgetSpent, SubjectTimeoutError):
                break  # as far as it is narrowed by then
            except Exception as problem:
                assert self.last is not None
                if type(problem) is type(found.problem):
                    found, fails = Found(self.last, problem), middle
                    continue
                works = middle
            else:
                works = middle
        return found, works, fails

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
        # an id of its own for every property: the cases of one do not depend on which others ran; and another choice of
        # what is not fixed for each length, so that no form is the only one that any of them sees
        own = int.from_bytes(self.prop.id.encode()[-6:], "big")
        return self.bench.settings.seed * 1_000_003 + own + self._turn * 10_007

    def _sweep(self) -> Iterator[dict[str, Any]]:
        if not self.prop.sweeps_lengths:
            return
        for index, config in enumerate(self.bench.configs[: self.effort.sweep_configs]):
            for length, dtype in zip(
                colliding_lengths(self.bench.subject, config), in_turns(self.bench, config), strict=False
            ):
                if self.effort.tokens is None or length <= self.effort.tokens:
                    yield {"config": index, "T": length, **dtype}

    def _judge(self, draws: Draws) -> None:
        if self.allowance.is_spent:
            raise BudgetSpent
        self.last = Case(self.bench, draws, turn=0 if self._walks_all else self.bench.tally.examples)
        self.bench.tally.wants_float64 = False
        self._check()
        if self.bench.tally.wants_float64:  # what float32 rounded away, float64 tells
            self.last = Case(self.bench, RandomDraws(0, {**self.last.choices, "dtype": "float64"}), turn=1)
            self._check()
        self.bench.tally.examples += 1

    def _check(self) -> None:
        """Judge the last case; what fails in half precision alone is a question, and refused sizes are given up."""
        assert self.last is not None
        try:
            self.prop.check(self.last)
        except SizesRefusedError as problem:
            if self.last.reaches:
                raise
            self.bench.tally.note_unreached(f"{self.last.config()} (refused: {why(problem)})")
            self.last.reject(f"build refuses {self.last.config()}")
            raise
        except Violation as problem:
            if self.last.is_in_half and problem.asks is None:
                problem.asks = ("half_precision", False)
            raise

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

        run = hypothesis.seed(self._seed())(_settings(examples, shrinks=self.shrinks)(given(_DATA)(judge)))
        run.__dict__["_hypothesis_internal_database_key"] = (
            b""  # nothing is kept; else it reads and tokenizes this file
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
            if not failed and self.allowance.is_spent:
                raise BudgetSpent from problem  # Hypothesis calls a run that ends for want of time a flaky one
            return failed[-1] if failed else Found(self.last, problem)
        return None
