"""The ledger of claims in every form: lines on a terminal, Markdown, one HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from veriformer.reports.claims_figures import figures
from veriformer.reports.formulas import as_svg
from veriformer.reports.page import render
from veriformer.reports.readable import as_code, in_markdown

SCHEMA = "veriformer-claims/1"
VERDICTS = ("refuted", "holds if", "holds", "undecided", "not testable here")
_STYLES = {
    "refuted": "bold red",
    "holds if": "yellow",
    "holds": "green",
    "undecided": "magenta",
    "not testable here": "dim",
}
_ROLES = {"written": "as written", "restricted": "under the condition", "corrected": "corrected"}
_MARKS = {True: "✓", False: "✗", None: "?"}

Row = Mapping[str, Any]


def counts(record: Mapping[str, Any]) -> str:
    """Return how many claims came out how, in one line."""
    found = Counter(row["verdict"] for row in record["claims"])
    told = ", ".join(
        f"{found[v]} {'hold' if v == 'holds' else 'hold under a condition' if v == 'holds if' else v}"
        for v in VERDICTS
        if found[v]
    )
    return f"{len(record['claims'])} claims: {told}"


def number(low: float | None, high: float | None) -> str:
    """Return a measured number, or the interval that it lies in."""
    if low is None or high is None:
        return "no number"
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def limits(finding: Row) -> str:
    """Return where a number must lie."""
    least, most = finding["least"], finding["most"]
    if least is not None and most is not None:
        half = (most - least) / 2
        if half > 1e-6 * abs(least):
            return f"{least:.6g} to {most:.6g}"
        return f"{least + half:.9g}" + (f" ± {half:.1g}" if half else "")
    return f"≤ {most:.6g}" if least is None else f"≥ {least:.6g}"


def told(row: Row) -> str:
    """Return what a row says beyond its statement: the condition, what is true in its place, or why it is open."""
    if row["verdict"] == "holds if":
        return f"if {row['condition']}"
    if row["verdict"] == "refuted":
        return row["corrected"] or "no true statement was put in its place"
    return row["problem"] or row["reason"]


def seeds(row: Row) -> str:
    """Return on which seeds a row's intervals were measured; empty where nothing in it is drawn anew."""
    drawn = row.get("seeds")
    return f"seeds {drawn[0]} to {drawn[1]}" if drawn else ""


def print_row(console: Console, row: Row) -> None:
    """Print one claim, its verdict beside it, and below it what is true in its place."""
    table = Table.grid(
        Column(width=3, justify="right"), Column(width=12), Column(ratio=1), padding=(0, 2, 0, 0), expand=True
    )
    table.add_row(str(row["number"]), Text(row["verdict"], style=_STYLES[row["verdict"]]), Text(row["statement"]))
    if more := told(row):
        table.add_row("", "", Text(more, style="dim"))
    console.print(table)


def explained(row: Row) -> str:
    """Return one claim in full, as plain text."""
    lines = [f"Claim {row['number']}: {row['statement']}", "", f"  verdict     {row['verdict']}"]
    if more := told(row):
        lines.append(f"              {more}")
    lines += [f"  source      {s['notes']}, {s['section']}" for s in row["sources"]]
    if row["formula"]:
        lines.append(f"  formula     {row['formula']}")
    lines.append(f"  why         {row['derivation']}")
    if row["cites"]:
        lines.append(f"  see         {row['cites']}")
    lines.append("  evidence")
    for f in row["findings"]:
        mark = _MARKS[f["holds"]]
        lines.append(
            f"    {mark} {_ROLES[f['role']]}: {f['says']}: {number(f['low'], f['high'])} (must be {limits(f)}; "
            f"{f['how']})"
        )
    lines += [f"    {name}: {json.dumps(value)}" for name, value in row["shown"].items()]
    if drawn := seeds(row):
        lines.append(f"    {drawn}")
    return "\n".join([*lines, f"  command     {row['command']}"])


def markdown(record: Mapping[str, Any]) -> str:
    """Return the ledger as Markdown: a table of all, then each claim with its evidence."""
    lines = [
        "# The claims ledger",
        "",
        _introduction(record),
        "",
        "| # | claim | source | verdict | |",
        "|--:|---|---|---|---|",
    ]
    for row in record["claims"]:
        cells = (row["statement"], ", ".join(s["cited_as"] for s in row["sources"]), row["verdict"], told(row))
        lines.append(
            f"| [{row['number']}](#claim-{row['number']}) | " + " | ".join(in_markdown(c) for c in cells) + " |"
        )
    for row in record["claims"]:
        lines += ["", f"## Claim {row['number']}", "", f"{in_markdown(row['statement'])} **{row['verdict']}**"]
        if more := told(row):
            lines += ["", in_markdown(more)]
        lines += ["", in_markdown(row["derivation"]), ""]
        if row["findings"]:
            lines += ["| speaks for | measured | number | must be | |", "|---|---|---|---|---|"]
        for f in row["findings"]:
            measured = (_ROLES[f["role"]], f["says"], number(f["low"], f["high"]), limits(f), _MARKS[f["holds"]])
            lines.append("| " + " | ".join(in_markdown(c) for c in measured) + " |")
        lines += ["", as_code(row["command"]) + (f" ({drawn})" if (drawn := seeds(row)) else "")]
    lines += ["", "## Systems of the notes", "", "| system | notes | where | claims |", "|---|---|---|---|"]
    for system in record["systems"]:
        numbers = ", ".join(map(str, system["claims"]))
        cells = (system["name"], system["cited"], system["where"] or f"not here: {system['why_not']}", numbers)
        lines.append("| " + " | ".join(in_markdown(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def exercises(record: Mapping[str, Any]) -> str:
    """Return the exercises of the notes as Markdown: question, table, answer."""
    rows = {row["number"]: row for row in record["claims"]}
    lines = [
        "# The exercises of the notes, answered",
        "",
        "Each answer follows from the verdict of a claim of the [ledger](claims.md).",
    ]
    for exercise in record["exercises"]:
        lines += ["", f"## {exercise['name']}", "", in_markdown(exercise["question"])]
        for index, claim in enumerate(exercise["claims"]):
            lines += ["", in_markdown(exercise["answers"][index]) + f" ([claim {claim}](claims.md#claim-{claim}))", ""]
            lines += ["| measured | number | must be | |", "|---|---|---|---|"]
            for f in rows[claim]["findings"]:
                cells = (
                    f"{f['says']} ({_ROLES[f['role']]})",
                    number(f["low"], f["high"]),
                    limits(f),
                    _MARKS[f["holds"]],
                )
                lines.append("| " + " | ".join(in_markdown(c) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _introduction(record: Mapping[str, Any]) -> str:
    few = " Few seeds and small sizes were used (--quick)." if record["quick"] else ""
    if record.get("first_seed") is not None:
        few += f" This is a repetition on seeds from {record['first_seed']} on."
    return (
        f"{counts(record)}. A verdict follows from the findings by rule: a statement holds if every number "
        f"measured for it as written "
        "lies where it must; it holds if its condition is met when that fails and all does under the condition; "
        "it is refuted when "
        f"what is put in its place holds; else it is undecided. Intervals are 95 %; seeds are those of no study.{few} "
        f"Made with torch {record['torch']}."
    )


def page(record: Mapping[str, Any]) -> str:
    """Return the ledger as one HTML page: filtered by verdict, notes, topic; each row opens."""
    rows = record["claims"]
    notes = sorted({(s["cited_as"][0], s["notes"]) for row in rows for s in row["sources"]})
    return render(
        "claims.html.j2",
        rows=rows,
        introduction=_introduction(record),
        verdicts=[v for v in VERDICTS if any(r["verdict"] == v for r in rows)],
        notes=notes,
        topics=sorted({r["topic"] for r in rows}),
        told=told,
        seeds=seeds,
        number=number,
        limits=limits,
        roles=_ROLES,
        as_svg=as_svg,
        figures=figures,
    )


def as_json(record: Mapping[str, Any]) -> str:
    """Return the ledger as JSON."""
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


FORMS = {
    "json": ("claims.json", as_json),
    "markdown": ("claims.md", markdown),
    "html": ("claims.html", page),
    "exercises": ("exercises.md", exercises),
}
"""Form to the name of its file and what makes it."""
