"""Outcomes and their reasons: the one place where what a judgement ended with becomes a `Result`."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veriformer.properties.bench.guards import NoRoomError, SubjectError, SubjectTimeoutError, whose_fault
from veriformer.properties.bench.measured import gives_no_gradients
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.counterexamples.record import counterexample
from veriformer.properties.engine.draws import ReplayError
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.searching.costs import effort_of
from veriformer.properties.engine.searching.search import Found, Search
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, VacuousCheckError, Violation
from veriformer.properties.judging.preflight import Preflight
from veriformer.properties.results import records as r
from veriformer.properties.results.records import Result
from veriformer.properties.subject.raised import told

STANDS_IN_THE_WAY = (r.FAIL, r.BLOCKED, r.ERROR, r.TIMEOUT)
"""Outcomes of a required property that block what requires it."""

_REENTRANT = ("torch.utils.checkpoint is incompatible with .grad()", "Checkpointing is not compatible with .grad()")
"""What torch raises, by its release, where a reentrant checkpoint is asked for the gradients of some tensors alone."""


def does_not_apply(prop: Property, reason: str) -> Result:
    """Return the outcome of a property that does not speak of the subject."""
    return Result(prop.id, prop.level, r.NOT_APPLICABLE, reason)


def costly(prop: Property) -> Result:
    """Return the outcome of a property that is left to the profile thorough."""
    return does_not_apply(prop, f"costly: runs in the profile thorough, or with --only {prop.id}")


def not_ready(prop: Property, ready: Preflight) -> Result:
    """Return the outcome where the subject cannot be built or called."""
    return Result(prop.id, prop.level, r.TIMEOUT if ready.timed_out else r.ERROR, ready.error)


def device_lost(prop: Property, told: str = "") -> Result:
    """Return the outcome where an assertion failed on the GPU, in this property, if something was told, or before."""
    reason = "an assertion failed on the GPU (an index out of bounds, say), which ends every later call of the process"
    where = f"; told of it: {told}" if told else "; it was in a property before this one"
    return Result(prop.id, prop.level, r.ERROR, reason + where)


def blocked(prop: Property, blocker: str) -> Result:
    """Return the outcome where a property that must hold first does not."""
    return Result(prop.id, prop.level, r.BLOCKED, f"{blocker} must hold first and does not")


def searched(prop: Property, bench: Workbench, *, is_brief: bool = False) -> Result:
    """Look for a violation, and return what came of it, however the search ended.

    Args:
        prop: to be judged.
        bench: of the subject.
        is_brief: leave a failing case as it was found, and write no counterexample.
    """
    bench.tally = Tally()
    try:
        found = Search(prop, bench, shrink=not is_brief).run()
        if is_brief and found is not None and isinstance(found.problem, Violation):
            return Result(prop.id, prop.level, r.FAIL, found.problem.headline, examples=bench.tally.examples)
        return of(prop, bench.tally, found)
    except BudgetSpent as problem:
        return _out_of_time(prop, bench, str(problem))
    except NotSpokenOfError as problem:
        return does_not_apply(prop, str(problem))
    except SubjectTimeoutError as problem:
        return Result(prop.id, prop.level, r.TIMEOUT, str(problem), examples=bench.tally.examples)
    except NoRoomError as problem:
        return Result(prop.id, prop.level, r.NOT_APPLICABLE, str(problem), unreached=[str(problem)])
    except SubjectError as problem:
        return Result(prop.id, prop.level, r.ERROR, str(problem), examples=bench.tally.examples)


def replayed(prop: Property, bench: Workbench, choices: Mapping[str, Any]) -> Result:
    """Judge one recorded case again, on every path, and return what came of it, however it ended."""
    bench.tally = Tally()
    try:
        return of(prop, bench.tally, Search(prop, bench).replay(choices))
    except BudgetSpent:
        return _out_of_time(prop, bench)
    except SubjectTimeoutError as problem:
        return Result(prop.id, prop.level, r.TIMEOUT, str(problem))


def of(prop: Property, tally: Tally, found: Found | None) -> Result:
    """Return the outcome of a search that ended: with nothing found, or with the smallest case that went wrong."""
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
        reach=dict(tally.reach),
        unreached=list(tally.unreached),
    )
    if found is None:
        result.outcome, result.reason = _of_nothing_found(tally)
    elif isinstance(found.problem, NoRoomError):
        result.outcome, result.reason = r.NOT_APPLICABLE, str(found.problem)
        result.unreached.append(str(found.problem))
    elif isinstance(found.problem, Violation):
        result.outcome, result.reason = r.FAIL, found.problem.headline
        result.counterexample = counterexample(prop, found.case, found.problem)
        asks = found.problem.asks or prop.asks
        result.declare = f"{asks[0]}={asks[1]!r}" if asks and found.case.bench.subject.fact(asks[0]) is None else ""
        result.error, result.tolerance = found.problem.error, found.problem.tolerance
    else:
        result.outcome, result.reason = _of_problem(found.problem, found.case.bench)
    return result


def _of_nothing_found(tally: Tally) -> tuple[str, str]:
    if not tally.examples and tally.given_up:
        return r.NOT_APPLICABLE, f"every case was given up: {'; '.join(sorted(tally.given_up))}"
    if tally.witnesses * 10 < max(tally.examples, 1):
        return (
            r.VACUOUS,
            f"its premise held {tally.witnesses} times in {tally.examples} examples: nothing was shown",
        )
    return r.PASS, tally.told


def _of_problem(problem: BaseException, bench: Workbench) -> tuple[str, str]:
    if isinstance(problem, VacuousCheckError):
        return r.VACUOUS, str(problem)
    if isinstance(problem, SubjectError | ReplayError):
        return r.ERROR, str(problem)
    said = told(problem)
    frames = traceback.extract_tb(problem.__traceback__)
    if any("autograd" in Path(frame.filename).parts for frame in frames):  # it is the subject's graph that raised
        if "does not require grad" in said and gives_no_gradients(bench):
            return r.NOT_APPLICABLE, "its forward gives no gradients: see parameters.all-used"
        if any(words in said for words in _REENTRANT):
            return r.NOT_APPLICABLE, (
                "its gradients cannot be asked for one by one: it checkpoints with use_reentrant=True, which allows "
                ".backward() alone; with use_reentrant=False they are judged"
            )
        return r.ERROR, f"the subject's backward raised {said}"
    if fault := whose_fault(problem):
        return r.ERROR, f"the subject's code raised {said} where it was looked at ({fault})"
    return r.ERROR, f"the check itself raised {said} (please report this)"


def _out_of_time(prop: Property, bench: Workbench, before: str = "") -> Result:
    if not bench.tally.examples and bench.tally.given_up:
        return of(prop, bench.tally, None)
    if not bench.tally.examples:
        seconds = effort_of(bench).property_seconds
        return Result(prop.id, prop.level, r.TIMEOUT, f"not one example was finished in {seconds:g} s")
    result = of(prop, bench.tally, None)
    if result.outcome == r.PASS:
        told = f"stopped after {bench.tally.examples} examples{before}: the time for one property was over"
        result.unreached.append(told)
    return result
