"""What a report says of a model that gave what the textbook's gives: what was compared, and what is wrong besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veriformer.reports.reach import sizes
from veriformer.reports.verdicts import TROUBLES, WORDS

_SHOWN = 3  # ids in a line that is not about them


def twin(subject: Mapping[str, Any]) -> str:
    """Return that a subject is the textbook's model, or how far it is; empty where that was not proved.

    Equal outputs are those that were compared, of this configuration in these modes: what fails elsewhere (another
    dtype, a longer sequence, training, gradients) is said in the same line, which speaks of equality no more.

    >>> equal = {"id": "twin.equal", "outcome": "PASS", "reason": "equal to the textbook's model"}
    >>> print(twin({"results": [equal]}))
    = equal to the textbook's model, its weights carried over in float64
    >>> print(twin({"results": [equal, {"id": "init.scale", "outcome": "FAIL"}]}))  # doctest: +ELLIPSIS
    ~ forward alone is equal to the textbook's model, its weights carried over in float64; not ...: init.scale (fail)
    """
    proved = next((r for r in subject["results"] if r["id"] == "twin.equal" and r["outcome"] == "PASS"), None)
    if proved is None or not proved["reason"]:
        return ""
    reached = sizes({"reach": proved.get("reach", {})})
    told = f"{proved['reason']}, its weights carried over in float64" + (f", at {reached}" if reached else "")
    wrong = [r for r in subject["results"] if r["outcome"] in (*TROUBLES, "DEVIATION")]
    if not wrong:
        return f"= {told}"
    named = ", ".join(f"{r['id']} ({WORDS[r['outcome']]})" for r in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return f"~ forward alone is {told}; not right nevertheless: {named}{more}"
