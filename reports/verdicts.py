"""What a report comes to: counts, the line of its badge, the words of its outcomes. One place for every format."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = {
    "PASS": "pass", "FAIL": "fail", "OPEN": "open", "DEVIATION": "deviation", "UNEXPECTED_PASS": "unexpected pass",
    "BLOCKED": "blocked", "VACUOUS": "vacuous", "ERROR": "error", "TIMEOUT": "timeout", "NOT_APPLICABLE": "n.a.",
}  # fmt: skip
"""Every outcome as people read it."""

NO_SCRIPT = "none: what fails here cannot be told by torch and your code alone; the command above shows it again"
"""Where a failure has no standalone script."""

TROUBLES = ("FAIL", "OPEN", "UNEXPECTED_PASS", "ERROR", "TIMEOUT", "VACUOUS", "BLOCKED")
"""Outcomes that are neither a pass, nor a declared deviation, nor silence."""


def results(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield `(subject, result)` for every result of a report."""
    for subject in record["subjects"]:
        for result in subject["results"]:
            yield subject, result


def name_of(subject: Mapping[str, Any]) -> str:
    """Return how the command line names a subject, or its own name."""
    return str(subject.get("target") or subject["name"])


def again(subject: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """Return the command that judges a recorded case again, in the folder of its run."""
    return shlex.join(["veriformer", "replay", case["id"], "--target", name_of(subject)])


def core(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many core properties hold or are declared deviations, of how many that apply."""
    counts = Counter(r["outcome"] for _, r in results(record) if r["level"] == "core")
    del counts["NOT_APPLICABLE"]
    return counts["PASS"] + counts["DEVIATION"], sum(counts.values())


def total(record: Mapping[str, Any]) -> str:
    """Return the counts of all outcomes, in words, without what does not apply."""
    counts = Counter(r["outcome"] for _, r in results(record))
    return (
        ", ".join(f"{counts[o]} {w}" for o, w in WORDS.items() if counts[o] and o != "NOT_APPLICABLE")
        or "nothing judged"
    )


def questions(subject: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return what is open on a subject, by the line that answers it if it is by design; first what names a cause."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in subject["results"]:
        if result["outcome"] == "OPEN":
            found.setdefault(result.get("declare", ""), []).append(result)
    return {line: sorted(asked, key=lambda r: not _cause(r)) for line, asked in found.items()}


def _cause(result: Mapping[str, Any]) -> str:
    return str((result.get("counterexample") or {}).get("cause", ""))


def told_by(subject: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, by the id of the failure that names a cause first, the ids of the others that name it, numbers apart."""
    stories: dict[str, list[str]] = {}
    for result in subject["results"]:
        if result["outcome"] == "FAIL":
            story = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", _cause(result)) or result["id"]
            stories.setdefault(story, []).append(result["id"])
    return {leading: others for leading, *others in stories.values()}


def shown_in_full(subject: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results whose case is printed: the first failure of every cause, and of every question the first."""
    leading = [asked[0] for asked in questions(subject).values()]
    first = told_by(subject)
    shown = [
        r
        for r in subject["results"]
        if (r["outcome"] == "FAIL" and r["id"] in first) or any(r is led for led in leading)
    ]
    return [r for r in shown if r.get("counterexample")]


def is_void(record: Mapping[str, Any]) -> bool:
    """Whether a known-broken model passed, so that the run says nothing."""
    return bool((record.get("canaries") or {}).get("missed"))


def provenance(record: Mapping[str, Any]) -> str:
    """Return what a report was made with, in one line."""
    releases = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
    return f"profile {record['profile']}, seed {record['seed']}, {record['device']}; {releases}"
