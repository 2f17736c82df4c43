"""Follow-up questions about a violation: none of them may hide it, and none is measured twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from veriformer.properties.bench.guards import SubjectTimeoutError
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError

T = TypeVar("T")


def answer_to(question: Callable[[], T | None] | None) -> T | None:
    """Return the answer to one question; None if there is no question, or if measuring went wrong in whatever way.

    Only what ends all questions passes: a call of the subject that hung, and Ctrl-C.
    """
    if question is None:
        return None
    try:
        return question()
    except (Exception, NotSpokenOfError):
        return None


def last_answer_to(question: Callable[[], T | None] | None) -> T | None:
    """Return the answer to a question that may ask others, as `answer_to` does; None if time ran out in it, too."""
    try:
        return answer_to(question)
    except (SubjectTimeoutError, BudgetSpent):
        return None


def first_answer(questions: Iterable[Callable[[], T | None]]) -> T | None:
    """Return the first answer that there is; a question that goes wrong leaves the others to speak."""
    return next((told for question in questions if (told := answer_to(question))), None)


def measured_once(case: Case, name: Hashable, question: Callable[[], str | None]) -> str | None:
    """Return what was answered for a subject before, or ask now, off the record.

    Args:
        case: of the violation.
        name: of the question, with all that its answer depends on.
        question: asked once a subject; a question that comes back to itself gets None.
    """
    key = ("once", name)
    if key not in case.bench.measured:
        case.bench.measured[key] = None
        with off_the_record(case):
            case.bench.measured[key] = question()
    told: str | None = case.bench.measured[key]
    return told
