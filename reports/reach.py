"""How far a subject was looked at, beside what it claims, in one line; and how that changed between reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from veriformer.reports.verdicts import name_of


def reach(subject: Mapping[str, Any]) -> str:
    """Return how far a subject was looked at, and what was not reached, in one line.

    >>> reach({"reach": {"T": [1, 65]}, "unreached": {"T 512 (memory)": ["a.b"]}, "claims": {"T": 512}})
    'T 1..65 of 512 · not reached: T 512 (memory)'
    """
    left = "; ".join(subject.get("unreached", {}))
    told = (sizes(subject), held_back(subject), left and f"not reached: {left}")
    return " · ".join(filter(None, told))


HELD_BACK = ", which must hold first, is a declared deviation"
"""How the reason ends of a property that was not judged, since one that it rests on is declared not to hold."""


def held_back(subject: Mapping[str, Any]) -> str:
    """Return how many properties deviations keep from being judged, in words; power and reach are those of the others.

    >>> held_back({"results": [{"outcome": "NOT_APPLICABLE", "reason": f"a.b{HELD_BACK}"}]})
    'without 1 property that a deviation from a.b holds back'
    """
    reasons = [r["reason"] for r in subject.get("results", ()) if r["outcome"] == "NOT_APPLICABLE"]
    held = [reason.removesuffix(HELD_BACK) for reason in reasons if reason.endswith(HELD_BACK)]
    many, by = "property" if len(held) == 1 else "properties", list(dict.fromkeys(held))
    who = f"a deviation from {by[0]} holds" if len(by) == 1 else f"deviations from {', '.join(by)} hold"
    return f"without {len(held)} {many} that {who} back" if held else ""


def sizes(subject: Mapping[str, Any]) -> str:
    """Return the sizes and dtypes that a subject was looked at in; empty where no property called it.

    >>> sizes({"reach": {"T": [1, 1025], "dtype": ["float32", "float64"]}, "facts": {"max_len": 2048}})
    'T 1..1025 of 2048 · float32 float64'
    """
    told = []
    facts = subject.get("facts", {})
    claims = ({"T": facts["max_len"]} if "max_len" in facts else {}) | subject.get("claims", {})
    for name, values in subject.get("reach", {}).items():
        if isinstance(values[0], str):
            told.append(" ".join(values))
            continue
        low, high = values
        claimed = f" of {claims[name]}" if name in claims and (name == "T" or claims[name] > high) else ""
        told.append(f"{name} {low}..{high}{claimed}" if low < high else f"{name} {high}{claimed}")
    return " · ".join(told)


def reach_changes(records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Return what another report reached of a subject than the one before that knew it.

    Args:
        records: pairs of a file's name and its report, in order.

    Returns:
        Each with `name`, `from`, `before`, `to`, `after`.
    """
    known: dict[str, tuple[str, str]] = {}
    found = []
    for source, record in records:
        for subject in record["subjects"]:
            name, after = name_of(subject), reach(subject)
            was, before = known.get(name, (source, after))
            if before != after and before and after:
                found.append({"name": name, "from": was, "before": before, "to": source, "after": after})
            known[name] = (source, after)
    return found
