"""Questions: what was seen to break may be a defect or the design, and only the subject's author knows which.

Four ways lead to one. A property, or one of its comparisons, names the fact that would take a violation back; the
property rests on a fact that only a probe saw; a probe sees what would narrow what is judged (a prefix, a window, a
decoder that does not tell orders apart), uses it, and asks; a cause names a fact, and with it the failure is gone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from veriformer.properties.engine.property import Property
from veriformer.properties.probes.findings import Question
from veriformer.properties.results import records as r
from veriformer.properties.results.records import Result
from veriformer.properties.subject.facts import FACTS

SILENCING = ("quantised", "structure", "sparse", "half_precision")
"""Facts with which much does not apply: that a failure is one of these says nothing, unless its own cause names one."""

MOST_QUESTIONS = 2
"""Questions that a person is asked at once, before it is looked whether one answer settles several."""

_ASKED = ": a defect, or by design?"
_DECLARE = re.compile(r"declare (\w+)=('[^']*'|[\w.+-]+)")


def with_questions(result: Result, prop: Property, seen: Mapping[str, Any], asked: Mapping[str, Question]) -> Result:
    """Return a result as a question, where it is one.

    Args:
        result: of the property; changed in place.
        prop: the property.
        seen: facts that probes found and nothing declares.
        asked: what probes ask, by the id of the property that the answer decides about.
    """
    if result.outcome == r.PASS and prop.id in asked:
        question = asked[prop.id]
        return _open(result, question.text, question.declare)
    if result.outcome != r.FAIL:
        return result
    if result.declare:
        return _open(result, f"{result.reason}{_ASKED}", result.declare)
    rests_on = next((name for name in prop.rests_on if name in seen), None)
    if rests_on is None:
        return result
    premise = f"that {rests_on} = {seen[rests_on]!r} was seen and is not declared"
    told = f"{result.reason}; {premise}: a defect, or otherwise meant?"
    return _open(result, told, f"{rests_on}={_otherwise(rests_on, seen[rests_on])}")


def suggested(result: Result) -> dict[str, Any]:
    """Return the facts that a failure's cause, or a question, names as what would take it back: `declare sink=True`."""
    told = [f"declare {result.declare}"] if result.declare else []
    told += [result.counterexample.cause] if result.counterexample else []
    found: dict[str, Any] = {}
    for name, written in _DECLARE.findall(" ".join(told)):
        try:
            value = ast.literal_eval(written)
        except (ValueError, SyntaxError):
            continue
        if name in FACTS and FACTS[name].accepts(value):
            found[name] = value
    return found


def answered_by(result: Result, **facts: Any) -> Result:
    """Return a failure, or another question, as the one that facts would answer: with them it does not occur."""
    declare = ", ".join(f"{fact}={value!r}" for fact, value in facts.items())
    return _open(result, f"{result.reason.partition(_ASKED)[0]}{_ASKED}", declare)


def _open(result: Result, text: str, declare: str) -> Result:
    result.outcome, result.reason, result.declare = r.OPEN, f"{text} If by design declare {declare}", declare
    return result


def _otherwise(fact: str, value: Any) -> str:
    """Return another value of a fact, as one writes it."""
    if isinstance(value, bool):
        return repr(not value)
    return repr("other") if FACTS[fact].accepts("other") and value != "other" else "what it is meant to be"
