"""A report as one HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from veriformer.reports.page import render
from veriformer.reports.readable import as_code, in_markdown
from veriformer.reports.verdicts import (
    NO_SCRIPT,
    TROUBLES,
    WORDS,
    again,
    core,
    is_void,
    name_of,
    provenance,
    questions,
    results,
    total,
)


def page(record: Mapping[str, Any]) -> str:
    """Return the page: every result, to be filtered and sorted; each failure with its case. One file, no network.

    Args:
        record: under `veriformer-report/1`.
    """
    holds, applicable = core(record)
    return render(
        "report.html.j2",
        record=record,
        words=WORDS,
        no_script=NO_SCRIPT,
        name_of=name_of,
        total=total(record),
        provenance=provenance(record),
        holds=holds,
        applicable=applicable,
        void=is_void(record),
        asked=[(s, declare, of) for s in record["subjects"] for declare, of in questions(s).items()],
        case=_case,
        again=again,
        mark=_mark,
    )


def markdown(record: Mapping[str, Any]) -> str:
    """Return the report as Markdown: a row a subject, then what does not simply pass, with reasons."""
    rows = [
        {
            "subject": in_markdown(name_of(s)),
            "kind": in_markdown(s["kind"]),
            **{word: _count(s, o) for o, word in WORDS.items()},
            "power": _power(s),
        }
        for s in record["subjects"]
    ]
    used = [key for key in (rows[0] if rows else {}) if any(row[key] for row in rows)]
    table = tabulate([{k: row[k] or "" for k in used} for row in rows], headers="keys", tablefmt="github")
    lines = ["# veriformer", "", f"{total(record)}; {in_markdown(provenance(record))}.", "", table, ""]
    if is_void(record):
        lines.insert(2, "**Void: a known-broken model passed.**\n")
    for subject in record["subjects"]:
        for declare, asked in questions(subject).items():
            ids, reason = ", ".join(r["id"] for r in asked), asked[0]["reason"]
            lines.append(f"- **open** {as_code(name_of(subject))} {in_markdown(f'{ids}: {reason}')} {as_code(declare)}")
    for subject, result in results(record):
        if result["outcome"] in (*TROUBLES, "DEVIATION") and result["outcome"] != "OPEN":
            told = in_markdown(f"{result['id']}: {result['reason']}")
            lines.append(f"- **{WORDS[result['outcome']]}** {as_code(name_of(subject))} {told}")
            found = result.get("counterexample")
            if found and found.get("cause"):
                lines.append(f"  likely: {in_markdown(found['cause'])}")
    return "\n".join(lines).rstrip() + "\n"


def _count(subject: Mapping[str, Any], outcome: str) -> int:
    return sum(r["outcome"] == outcome for r in subject["results"])


def _power(subject: Mapping[str, Any]) -> str:
    power = subject["power"]
    return f"{power['noticed']}/{power['tried']}" if power and power["tried"] else (power or {}).get("why", "")


def _case(found: Mapping[str, Any]) -> str:
    drawn = " ".join(f"{k}={v}" for k, v in found["choices"].items() if k != "config")
    return f"{drawn} ({found['sizes']})" if found["sizes"] else drawn


def _mark(magnitude: float | None, allowed: bool) -> str:
    if magnitude:
        return "allowed" if allowed else "illegal"
    return "missing" if allowed else ""
