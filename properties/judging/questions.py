"""Questions: what was seen to break may be a defect or the design, and only the subject's author knows which.

Three ways lead to one. A property breaks whose premise nobody declared: `Property.asks` names the fact that would take
it back, and a fact that only a probe found never fails a model. Its cause measured the value of a fact with which it
would hold ("declare label_smoothing=0.1 if that is meant") and that is declared nowhere. Or a probe sees what would
narrow what is judged (a prefix, a window, a decoder that does not tell orders apart): it uses it, and asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from veriformer.properties.engine.property import Property
from veriformer.properties.probes.findings import Question
from veriformer.properties.results import records as r
from veriformer.properties.results.records import Result
from veriformer.properties.subject.facts import FACTS
from veriformer.properties.subject.subject import Subject

_FITS = re.compile(r"\(declare (?P<declare>(?P<fact>\w+)=\S+) if that is meant\)")
"""A cause that found the value of a fact with which the property would hold."""


def with_questions(
    result: Result, prop: Property, given: Subject, seen: Mapping[str, Any], asked: Mapping[str, Question]
) -> Result:
    """Return a result as a question, where it is one.

    Args:
        result: of the property; changed in place.
        prop: the property.
        given: the subject, as it was declared.
        seen: facts that probes found and nothing declares.
        asked: what probes ask, by the id of the property that the answer decides about.
    """
    if result.outcome == r.PASS and prop.id in asked:
        question = asked[prop.id]
        return _open(result, question.text, question.declare)
    if result.outcome != r.FAIL:
        return result
    if prop.asks and given.fact(prop.asks[0]) is None:
        name, value = prop.asks
        return _open(result, f"{result.reason}: a defect, or by design?", f"{name}={value!r}")
    cause = result.counterexample.cause if result.counterexample else ""
    fitting = _FITS.search(cause or "")
    if fitting and given.fact(fitting["fact"]) is None:
        return _open(result, f"{result.reason}: {cause[: fitting.start()].strip()}.", fitting["declare"])
    rests_on = next((name for name in prop.rests_on if name in seen), None)
    if rests_on is None:
        return result
    premise = f"that {rests_on} = {seen[rests_on]!r} was seen and is not declared"
    told = f"{result.reason}; {premise}: a defect, or otherwise meant?"
    return _open(result, told, f"{rests_on}={_otherwise(rests_on, seen[rests_on])}")


def _open(result: Result, text: str, declare: str) -> Result:
    result.outcome, result.reason, result.declare = r.OPEN, f"{text} If by design declare {declare}", declare
    return result


def _otherwise(fact: str, value: Any) -> str:
    """Return another value of a fact, as one writes it."""
    if isinstance(value, bool):
        return repr(not value)
    return repr("other") if FACTS[fact].accepts("other") and value != "other" else "what it is meant to be"
