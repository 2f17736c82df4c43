"""The engine: judges a subject by properties, and says honestly what came of each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from veriformer.properties import results as r
from veriformer.properties.counterexample import counterexample
from veriformer.properties.draws import ReplayError
from veriformer.properties.faults import power
from veriformer.properties.findings import Finding
from veriformer.properties.isolation import isolated
from veriformer.properties.pool import callable_subject
from veriformer.properties.preflight import Preflight, preflight
from veriformer.properties.probe import identify, probe
from veriformer.properties.profiles import Settings
from veriformer.properties.property import Property, catalogue, in_dependency_order, named
from veriformer.properties.results import Report, Result, SubjectReport
from veriformer.properties.search import Found, Search
from veriformer.properties.subject import Subject
from veriformer.properties.violations import (
    BudgetSpent,
    NotSpokenOfError,
    SubjectError,
    SubjectTimeoutError,
    VacuousCheckError,
    Violation,
)
from veriformer.properties.walked import never_walked
from veriformer.properties.workbench import Tally, Workbench

OnResult = Callable[[Subject, Result], None]


class Judge:
    """Judges one subject, property by property, in an order that the caller chooses."""

    def __init__(self, subject: Subject, settings: Settings) -> None:
        self.subject = subject
        self.settings = settings
        self._bench: Workbench | None = None
        self._preflight: Preflight | None = None
        self._notes: list[str] = []
        self._outcomes: dict[str, str] = {}

    def judge(self, prop: Property) -> Result:
        """Return the outcome of one property. Never raises for anything the subject does; Ctrl-C passes through."""
        started = time.perf_counter()
        with isolated(self.subject.module):
            result = self._judge(prop)
        result.seconds = time.perf_counter() - started
        self._outcomes[prop.id] = result.outcome
        return result

    def prove_power(self, properties: Sequence[Property]) -> dict[str, Any] | None:
        """Put faults into the subject and return how many the properties of this run notice; see `faults.power`."""
        with isolated(self.subject.module):
            ready = self._prepare()
            if self._bench is None or ready.error or ready.broken:
                return None
            try:
                return power(self._bench, properties)
            except (SubjectError, ValueError):  # at sizes that no property drew; properties show what it raises
                return None

    def never_walked(self, walked: Iterable[str]) -> dict[str, str]:
        """Return the forms of path that are not among those walked, each with the reason; see `walked`."""
        if self._bench is None or self._preflight is None or self._preflight.error:
            return {}
        return never_walked(self._bench.subject, walked)

    def identify(self) -> tuple[list[Finding], str]:
        """Return what can be seen of the subject, declared or not; and why nothing can, or an empty sentence."""
        with isolated(self.subject.module):
            ready = self._prepare()
            if self._bench is None or ready.error:
                return [], ready.error or "it cannot be built"
            return identify(self._bench), ""

    @property
    def known(self) -> dict[str, str]:
        """Outcomes so far, by id."""
        return dict(self._outcomes)

    def learn(self, prop_id: str, outcome: str) -> None:
        """Take over an outcome that was found elsewhere (another process), for what requires it."""
        self._outcomes[prop_id] = outcome

    def replay(self, prop: Property, choices: dict[str, Any]) -> Result:
        """Judge one recorded case again."""
        with isolated(self.subject.module):
            ready = self._prepare()
            if self._bench is None or ready.error:
                return Result(prop.id, prop.level, r.ERROR, ready.error)
            self._bench.tally = Tally()
            return _result(prop, self._bench.tally, Search(prop, self._bench).replay(choices))

    @property
    def probed(self) -> list[str]:
        """What was found out rather than declared, one sentence each; empty before the first property was judged."""
        return self._notes

    def _judge(self, prop: Property) -> Result:
        if self.subject.kind not in prop.kinds:
            return Result(prop.id, prop.level, r.NOT_APPLICABLE, prop.why_not(self.subject) or "")
        if prop.costly and self.settings.profile != "thorough" and prop.id not in self.settings.named:
            told = f"costly: runs in the profile thorough, or with --only {prop.id}"
            return Result(prop.id, prop.level, r.NOT_APPLICABLE, told)
        try:
            ready = self._prepare()
        except SubjectTimeoutError as problem:
            self._preflight = ready = Preflight(error=str(problem), timed_out=True)
        reason = prop.why_not(self._bench.subject if self._bench else self.subject)
        if reason:
            return Result(prop.id, prop.level, r.NOT_APPLICABLE, reason)
        if ready.error:
            return Result(prop.id, prop.level, r.TIMEOUT if ready.timed_out else r.ERROR, ready.error)
        blocker = self._blocker(prop, ready)
        if blocker:
            return Result(prop.id, prop.level, r.BLOCKED, f"{blocker} must hold first and does not")
        assert self._bench is not None
        return _search(prop, self._bench)

    def _prepare(self) -> Preflight:
        """Build and call the subject once, find out what it did not declare; what comes of it is kept."""
        if self._preflight is None:
            try:
                self._bench = Workbench(self.subject, self.settings)
                self._bench.subject = callable_subject(self.subject, self._bench.pool)
                self._preflight = preflight(self._bench)
                if not self._preflight.error and not self._preflight.broken:
                    facts, self._notes = probe(self._bench)
                    self._bench.subject = self._bench.subject.with_facts(**facts)
            except (SubjectError, ValueError) as problem:
                self._preflight = Preflight(error=str(problem))
            except Exception as problem:  # a module that was never initialised breaks wherever it is looked at
                self._preflight = Preflight(error=f"looking at the subject raised {type(problem).__name__}: {problem}")
        return self._preflight

    def _blocker(self, prop: Property, ready: Preflight) -> str | None:
        if prop.id in ready.broken:
            return None
        if ready.broken:
            return ready.broken[0]
        failed = (r.FAIL, r.BLOCKED, r.ERROR, r.TIMEOUT)
        return next((i for i in prop.requires if self._outcomes.get(i) in failed), None)


def _search(prop: Property, bench: Workbench) -> Result:
    bench.tally = Tally()
    search = Search(prop, bench)
    try:
        return _result(prop, bench.tally, search.run())
    except BudgetSpent:
        if bench.tally.examples:
            result = _result(prop, bench.tally, None)
            if result.outcome == r.PASS:
                result.reason = f"stopped after {bench.tally.examples} examples: the time for one property was over"
            return result
        seconds = bench.settings.effort.property_seconds
        return Result(prop.id, prop.level, r.TIMEOUT, f"not one example was finished in {seconds:g} s")
    except NotSpokenOfError as problem:
        return Result(prop.id, prop.level, r.NOT_APPLICABLE, str(problem))
    except SubjectTimeoutError as problem:
        return Result(prop.id, prop.level, r.TIMEOUT, str(problem), examples=bench.tally.examples)
    except SubjectError as problem:
        return Result(prop.id, prop.level, r.ERROR, str(problem), examples=bench.tally.examples)


def _result(prop: Property, tally: Tally, found: Found | None) -> Result:
    result = Result(
        prop.id,
        prop.level,
        r.PASS,
        examples=tally.examples,
        witnesses=tally.witnesses,
        error=tally.error,
        tolerance=tally.tolerance,
        margin=tally.margin,
        subject_seconds=tally.subject_seconds,
        paths=dict(tally.paths),
        measures=dict(tally.measures),
    )
    if found is None:
        if not tally.examples and tally.given_up:
            result.outcome = r.NOT_APPLICABLE
            result.reason = f"every case was given up: {'; '.join(sorted(tally.given_up))}"
        elif tally.witnesses * 10 < max(tally.examples, 1):
            result.outcome = r.VACUOUS
            result.reason = f"its premise held {tally.witnesses} times in {tally.examples} examples: nothing was shown"
    elif isinstance(found.problem, Violation):
        result.outcome, result.reason = r.FAIL, found.problem.headline
        result.counterexample = counterexample(prop, found.case, found.problem)
        result.error, result.tolerance = found.problem.error, found.problem.tolerance
    elif isinstance(found.problem, VacuousCheckError):
        result.outcome, result.reason = r.VACUOUS, str(found.problem)
    elif isinstance(found.problem, SubjectError | ReplayError):
        result.outcome, result.reason = r.ERROR, str(found.problem)
    else:
        problem = found.problem
        told = f"{type(problem).__name__}: {(str(problem).strip() or 'no message').splitlines()[0][:300]}"
        frames = traceback.extract_tb(problem.__traceback__)
        own = any("autograd" in Path(frame.filename).parts for frame in frames)  # it is the subject's graph that raised
        result.outcome = r.ERROR
        result.reason = (
            f"the subject's backward raised {told}" if own else f"the check itself raised {told} (please report this)"
        )
    return result


def select(only: Sequence[str] = (), exclude: Sequence[str] = (), level: str = "all") -> list[Property]:
    """Return the properties to judge, in dependency order.

    Args:
        only: ids or families; empty for all.
        exclude: ids or families to leave out.
        level: "core" or "all".

    Raises:
        KeyError: an id does not exist; the message suggests the nearest one.
    """
    chosen = named(only) if only else list(catalogue().values())
    left_out = {p.id for p in named(exclude)} if exclude else set()
    return in_dependency_order(p for p in chosen if p.id not in left_out and (level == "all" or p.level == "core"))


def run(
    subjects: Sequence[Subject],
    properties: Sequence[Property],
    settings: Settings,
    on_result: OnResult | None = None,
) -> Report:
    """Judge every subject by every property, in this process.

    Args:
        subjects: what to judge.
        properties: in dependency order.
        settings: of the run.
        on_result: called after each result, for progress.
    """
    from veriformer.properties.canaries import send  # they are judged by this engine

    started = time.perf_counter()
    report = Report([], settings.seed, settings.profile, settings.device)
    report.canaries = send((s.kind for s in subjects), properties, settings)
    report.subjects += [judge_subject(subject, properties, settings, on_result) for subject in subjects]
    report.seconds = time.perf_counter() - started
    return report


def judge_subject(
    subject: Subject, properties: Sequence[Property], settings: Settings, on_result: OnResult | None = None
) -> SubjectReport:
    """Judge one subject by every property, in this process, and put faults into it; see `run`."""
    part = SubjectReport(subject.name, subject.kind, subject.target, dict(subject.declares))
    judge = Judge(subject, settings)
    for prop in properties:
        part.results.append(result := judge.judge(prop))
        if on_result is not None:
            on_result(subject, result)
    part.probed = judge.probed
    part.power = judge.prove_power(properties)
    part.never_walked = judge.never_walked(path for result in part.results for path in result.paths)
    return part
