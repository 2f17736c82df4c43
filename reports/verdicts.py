"""What a report comes to: counts, the line of its badge, the words of its outcomes. One place for every format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from veriformer.reports.stories import cause_of, stories

WORDS = {
    "PASS": "pass", "FAIL": "fail", "OPEN": "open", "DEVIATION": "deviation", "UNEXPECTED_PASS": "unexpected pass",
    "BLOCKED": "blocked", "VACUOUS": "vacuous", "ERROR": "error", "TIMEOUT": "timeout", "NOT_APPLICABLE": "n.a.",
}  # fmt: skip
"""Every outcome as people read it."""

MEANINGS = {
    "PASS": "It held in every case that was judged, its premise was really met, and the case could have failed.",
    "FAIL": "A case was found in which it does not hold. The smallest one is shown, with its cause where one was "
    "measured, and kept for `veriformer replay`.",
    "OPEN": "What was seen is a defect, or by design: nobody said which. The report gives the line to declare if it is "
    "by design; until then it counts as not passed.",
    "DEVIATION": "It does not hold, and a deviations file says so with its reason.",
    "UNEXPECTED_PASS": "A deviations file says that it does not hold, and it holds: take the entry out.",
    "NOT_APPLICABLE": "It speaks of another kind, or of a fact that the subject does not have; the reason is given.",
    "BLOCKED": "A property that it requires does not hold, so that its own verdict would say nothing.",
    "VACUOUS": "No case met its premise, or the comparison could not have failed: that is never a pass.",
    "ERROR": "The subject or its adapter raised; the report shows its file, its line and its last frames.",
    "TIMEOUT": "The subject gave no answer in its time, and its process was ended.",
}
"""What every outcome says."""

STATUSES = (
    (0, "all applicable properties hold, or are declared deviations"),
    (1, "one does not hold, is open (not with `--allow-open`), or holds against its entry in a deviations file"),
    (2, "nothing could be judged, or a known-broken model went unnoticed"),
    (3, "usage, or all holds and what was asked for could not be written"),
    (130, "interrupted"),
)
"""Exit statuses of the commands that judge."""

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


Repeat = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, str]]
"""From a subject and one of its cases to the commands that show the case again from where a person stands: `again` and
`script`, each "" where its file was not written."""


def unrepeated(subject: Mapping[str, Any], case: Mapping[str, Any]) -> Mapping[str, str]:
    """Return no commands: of a case that was written nowhere."""
    return {"again": "", "script": ""}


def core(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many core properties hold, of how many that apply; a declared deviation applies and does not hold."""
    counts = Counter(r["outcome"] for _, r in results(record) if r["level"] == "core")
    del counts["NOT_APPLICABLE"]
    return counts["PASS"], sum(counts.values())


def deviations(record: Mapping[str, Any]) -> str:
    """Return how many properties are declared not to hold, in words; "" where none is.

    >>> deviations({"subjects": [{"results": [{"outcome": "DEVIATION"}]}]})
    '1 known deviation'
    """
    count = sum(r["outcome"] == "DEVIATION" for _, r in results(record))
    return f"{count} known deviation{'s' * (count > 1)}" if count else ""


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
    return {line: sorted(asked, key=lambda r: not cause_of(r)) for line, asked in found.items()}


def told_by(subject: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, by the id of the failure that is told for a cause, the ids of the others of that cause."""
    return {story.told["id"]: [r["id"] for r in story.others] for story in stories(subject)}


def shown_in_full(subject: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results whose case is printed: one failure of every cause, and of every question the first."""
    asked = [asked[0] for asked in questions(subject).values() if asked[0].get("counterexample")]
    return [*(story.told for story in stories(subject)), *asked]


def is_void(record: Mapping[str, Any]) -> bool:
    """Whether a known-broken model passed, so that the run says nothing."""
    return bool((record.get("canaries") or {}).get("missed"))


def provenance(record: Mapping[str, Any]) -> str:
    """Return what a report was made with, in one line."""
    releases = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
    return f"profile {record['profile']}, seed {record['seed']}, {record['device']}; {releases}"
