"""One model in a table of many: its counts by family, its verdict, its twin, what is asked and what is believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from veriformer.reports.origins import place_of
from veriformer.reports.reach import reach
from veriformer.reports.verdicts import TROUBLES, name_of

_NO_TWIN = "no twin: "
"""How the reason of twin.equal begins where a model is not the textbook's."""
_OTHERWISE = {"OPEN": "asked", "DEVIATION": "parts", "NOT_APPLICABLE": "parts"}


def row_of(subject: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a subject of a report.

    Returns:
        `name`, `kind`, `library`, `cells` and `total` (counts of outcomes, by family and together), `verdict`, `power`,
        `seconds`, `reach`, `twin` and `parts` (see `twin_of`), `questions` (ids) and `believed` (facts).
    """
    cells: dict[str, Counter[str]] = {}
    for result in subject["results"]:
        if result["outcome"] != "NOT_APPLICABLE":
            cells.setdefault(result["id"].partition(".")[0], Counter())[result["outcome"]] += 1
    total = Counter(r["outcome"] for r in subject["results"] if r["outcome"] != "NOT_APPLICABLE")
    power = subject["power"]
    twin, parts = twin_of(subject)
    return {
        "name": name_of(subject),
        "kind": subject["kind"],
        "library": place_of(subject.get("of", subject.get("target")) or ""),
        "cells": {family: dict(counts) for family, counts in cells.items()},
        "total": dict(total),
        "power": f"{power['noticed']}/{power['tried']}" if power and power["tried"] else "",
        "seconds": subject.get("seconds"),
        "reach": reach(subject),
        "verdict": _verdict(total),
        "twin": twin,
        "parts": parts,
        "questions": [r["id"] for r in subject["results"] if r["outcome"] == "OPEN"],
        "believed": list(subject.get("believed") or []),
    }


def twin_of(subject: Mapping[str, Any]) -> tuple[str, str]:
    """Return whether a subject is the textbook's model, in a word, and where it parts from it.

    Returns:
        "equal", "parts", "asked", "fails" or, where its kind has no twin or nobody asked, an empty word; then the
        configuration that it is equal to, or the first place that differs.

    >>> parted = {"id": "twin.equal", "outcome": "NOT_APPLICABLE", "reason": "no twin: two norms a layer"}
    >>> twin_of({"results": [parted]})
    ('parts', 'two norms a layer')
    """
    result = next((r for r in subject["results"] if r["id"] == "twin.equal"), None)
    if result is None:
        return "", ""
    outcome, reason = result["outcome"], str(result["reason"])
    if outcome == "PASS":
        return "equal", reason
    if outcome == "NOT_APPLICABLE" and not reason.startswith(_NO_TWIN):
        return "", ""
    return _OTHERWISE.get(outcome, "fails"), reason.removeprefix(_NO_TWIN)


def _verdict(total: Mapping[str, int]) -> str:
    if any(total.get(outcome) for outcome in ("FAIL", "UNEXPECTED_PASS")):
        return "fail"
    if any(total.get(outcome) for outcome in TROUBLES if outcome != "OPEN"):
        return "error"
    if total.get("OPEN"):
        return "open"
    return "deviation" if total.get("DEVIATION") else "pass" if total.get("PASS") else "error"  # nothing was judged
