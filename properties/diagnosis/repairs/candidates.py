"""The changes of a subject's code that may mend a failure, and judging its cases while one of them is made."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from veriformer.properties.bench.guards import SubjectTimeoutError
from veriformer.properties.bench.tally import Tally
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.causes.tracing.lines import text_of
from veriformer.properties.diagnosis.repairs.mending import Mended, sites_of
from veriformer.properties.diagnosis.rewriting.edits import SLIP, TERM
from veriformer.properties.diagnosis.rewriting.rewritten import Rewriting, rewritings_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RecordedDraws, RejectedError, ReplayError
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError, Violation

_CALL_SECONDS = 2.0
"""Of one call of what a change may have made endless."""
_KNOWN = ("tolerance", "floor", "first floor", "float64", "narrow constants")
"""What was measured on the subject and is taken over: what rounding does to it."""


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
        of_call: whether it is behind a call, not in the source.
        by_one: whether a number is one more, or one less.
    """

    file: str
    number: int
    told: str
    rank: int
    made: Callable[[], AbstractContextManager[Any]]
    of_call: bool = False
    by_one: bool = False


def candidates_of(run: Callable[[], object]) -> Iterator[Repair]:
    """Yield what may be changed of what a run goes through: of the source, and behind single calls."""
    for rewriting in rewritings_of(run):
        edit = rewriting.edit
        yield Repair(rewriting.file, edit.line, _words(rewriting), edit.rank, rewriting.made, by_one=edit.by_one)
    for site, slips in sites_of(run).items():
        line = text_of(site.file, site.number)
        for slip in slips:
            rank = TERM if slip.leaves_out else SLIP
            yield Repair(site.file, site.number, f"{slip.told} in `{line}`", rank, partial(Mended, site, slip), True)


def _words(rewriting: Rewriting) -> str:
    edit = rewriting.edit
    shown, mended = " ".join(edit.shown.split()), _plain(edit.mended)
    if edit.new == "pass":
        return f"without `{shown}`"
    if mended == "behind the next statement":
        return f"`{shown}` behind the statement that follows it"
    return f"`{mended}` in place of `{shown}`"


def _plain(text: str) -> str:
    """Return a statement as one writes it, without parentheses that say nothing; as it is where it is none."""
    try:
        plain = " ".join(ast.unparse(ast.parse(textwrap.dedent(text))).split())
        return plain if '"' in plain or '"' not in text else plain.replace("'", '"')
    except SyntaxError:
        return " ".join(text.split())


def anew(bench: Workbench) -> Workbench:
    """Return the subject on a workbench of its own: its models are built anew; what rounding does to them is known."""
    settings = replace(bench.settings, call_seconds=min(bench.settings.call_seconds or _CALL_SECONDS, _CALL_SECONDS))
    other = Workbench(bench.subject, settings)
    other.measured = {key: value for key, value in bench.measured.items() if key[0] in _KNOWN}
    return other


def case_of(bench: Workbench, failure: Failure) -> Case:
    """Return the failing case, to be judged again."""
    return Case(bench, RecordedDraws(failure.choices))


def judged(prop: Property, case: Case, *, asks: bool = True) -> bool | None:
    """Judge a case: whether it holds; None where it speaks of nothing.

    Args:
        prop: to be judged.
        case: of it.
        asks: whether it does not hold either where that is a question.
    """
    case.bench.tally = Tally()
    try:
        prop.check(case)
    except (RejectedError, NotSpokenOfError, ReplayError):
        return None
    except Violation as problem:
        return None if (problem.asks or prop.asks or case.is_in_half) and not asks else False
    except (SubjectTimeoutError, BudgetSpent, Exception):
        return False
    return True
