"""Many implementations in one table: rows models, columns families of properties; as Markdown, CSV and HTML."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from veriformer.reports.compliance_rows import row_of
from veriformer.reports.origins import counted, many, sorts
from veriformer.reports.page import render
from veriformer.reports.readable import as_code, in_a_sheet, in_markdown
from veriformer.reports.records import write_text
from veriformer.reports.verdicts import TROUBLES, name_of, results

_MARKS = {"FAIL": "✗", "OPEN": "?", "DEVIATION": "d", "UNEXPECTED_PASS": "u", "ERROR": "e", "TIMEOUT": "t",
          "VACUOUS": "v", "BLOCKED": "b"}  # fmt: skip
_STRONG = 60  # per cent of the strongest colour, above which light letters are read better than dark ones
if TYPE_CHECKING:
    import pandas as pd

LEGEND = (
    "A cell counts properties: `12` hold; `11 1d` one of twelve is a declared deviation; `✗` fails, `?` is an "
    "open question, `e` raised, `t` time was up, `b` blocked by another, `v` nothing was shown, `u` declared and "
    "holds; `–` none applies. Textbook: `equal` to the textbook's model with its own weights, or it `parts` from it; "
    "open: questions; believed: declared facts that nothing verified."
)


def compliance(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a report: `families`, `rows`, `deviations`, `troubles`, and what it was made of.

    Args:
        record: under `veriformer-report/1`.
    """
    rows = [row_of(subject) for subject in record["subjects"]]
    order = {r["id"].partition(".")[0]: None for s in record["subjects"] for r in s["results"]}
    used = {family for row in rows for family in row["cells"]}
    return {
        "families": [family for family in order if family in used],
        "rows": rows,
        "deviations": _told(record, ("DEVIATION",)),
        "troubles": _told(record, TROUBLES),
        "not_judged": dict(record.get("not_judged", {})),
        "versions": record["versions"],
        "profile": record["profile"],
        "seed": record["seed"],
        "device": record["device"],
        "seconds": record.get("seconds"),
        "canaries": record.get("canaries"),
    }


def _told(record: Mapping[str, Any], outcomes: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"name": name_of(s), "id": r["id"], "outcome": r["outcome"], "reason": r["reason"]}
        for s, r in results(record)
        if r["outcome"] in outcomes
    ]


def cell(counts: Mapping[str, int]) -> str:
    """Return the text of a cell.

    >>> cell({"PASS": 11, "DEVIATION": 1}), cell({})
    ('11 1d', '–')
    """
    words = [str(counts["PASS"])] if counts.get("PASS") else []
    words += [f"{counts[outcome]}{mark}" for outcome, mark in _MARKS.items() if counts.get(outcome)]
    return " ".join(words) or "–"


def summary(table: Mapping[str, Any]) -> list[str]:
    """Return what the table says, in sentences."""
    verdicts = Counter(row["verdict"] for row in table["rows"])
    told = ", ".join(f"{verdicts[v]} {v}" for v in ("pass", "deviation", "open", "fail", "error") if verdicts[v])
    releases = ", ".join(f"{name} {version}" for name, version in sorted(table["versions"].items()))
    where = counted(row["library"] for row in table["rows"])
    twins = Counter(row["twin"] for row in table["rows"])
    lines = [f"{many(len(table['rows']), 'model')}{where and f' of {where}'}: {told or 'none judged'}."]
    if twins["equal"] or twins["parts"]:
        lines.append(
            f"{twins['equal']} equal to the textbook's model with their own weights, {twins['parts']} part from it."
        )
    if table["canaries"]:
        lines.append(f"Canaries {table['canaries']['caught']}/{table['canaries']['sent']}.")
    lines.append(f"Profile {table['profile']}, seed {table['seed']}, {table['device']}. {releases}.")
    return lines


def frame(table: Mapping[str, Any]) -> pd.DataFrame:
    """Return the table with one row a model, cells as text."""
    import pandas as pd  # half a second that `veriformer --help` need not wait for

    return pd.DataFrame(
        [
            {
                "model": row["name"], "kind": row["kind"], "verdict": row["verdict"], "total": cell(row["total"]),
                "power": row["power"], "textbook": row["twin"] or "–", "open": str(len(row["questions"]) or "–"),
                "believed": ", ".join(row["believed"]) or "–",
                **{f: cell(row["cells"].get(f, {})) for f in table["families"]},
            }
            for row in table["rows"]
        ]
    )  # fmt: skip


def markdown(table: Mapping[str, Any], command: str) -> str:
    """Return the table as Markdown: a table a library, deviations with reasons, what could not be judged."""
    whole = frame(table)
    lines = ["# Compliance", "", *map(in_markdown, summary(table)), "", LEGEND, "", f"Made by {as_code(command)}.", ""]
    for library in dict.fromkeys(row["library"] for row in table["rows"]):
        own = whole[[row["library"] == library for row in table["rows"]]]
        own = own.loc[:, [c for c in own if c in ("model", "kind", "total") or set(own[c]) != {"–"}]]
        lines += [
            f"## {in_markdown(library or 'others')}",
            "",
            tabulate(
                [{c: in_markdown(v) for c, v in row.items()} for row in own.to_dict("records")],
                headers="keys",
                tablefmt="github",
            ),
            "",
        ]
    for title, entries in (("Failures", table["troubles"]), ("Deviations", table["deviations"])):
        if entries:
            lines += [
                f"## {title}",
                "",
                *(f"- {as_code(e['name'])} {in_markdown('{id}: {outcome}: {reason}'.format_map(e))}" for e in entries),
                "",
            ]
    if table["not_judged"]:
        lines += ["## Not judged", "", "No small model could be built, or none could be called.", ""]
        lines += [f"- {as_code(name)}: {in_markdown(why)}" for name, why in table["not_judged"].items()]
    return "\n".join(lines).rstrip() + "\n"


def write_compliance(table: Mapping[str, Any], folder: Path, command: str = "veriformer sweep") -> None:
    """Write compliance.md, compliance.csv and compliance.html (one file, to be searched, works offline)."""
    write_text(folder / "compliance.md", markdown(table, command))
    buffer = io.StringIO()
    frame(table).map(in_a_sheet).to_csv(buffer, index=False)
    write_text(folder / "compliance.csv", buffer.getvalue())
    write_text(folder / "compliance.html", page(table, command))


def page(table: Mapping[str, Any], command: str, changed: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the table as one HTML page, a heat map that opens into models, with what changed between reports."""
    entries: dict[str, list[Mapping[str, str]]] = {}
    for entry in (*table["troubles"], *table["deviations"]):
        entries.setdefault(entry["name"], []).append(entry)
    return render("compliance.html.j2", table=table, cell=cell, summary=summary(table), command=command, legend=LEGEND,
                  changes=changed, heat=heat(table), shade=shade, entries=entries,
                  origins=sorts(row["library"] for row in table["rows"]))  # fmt: skip


def heat(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a line a library: its name, how many models, and the counts of each family over all of them."""
    lines: dict[str, dict[str, Any]] = {}
    for row in table["rows"]:
        line = lines.setdefault(row["library"], {"library": row["library"], "models": 0, "sums": {}})
        line["models"] += 1
        for family, counts in row["cells"].items():
            line["sums"].setdefault(family, Counter()).update(counts)
    return [{**line, "cells": [(f, line["sums"].get(f)) for f in table["families"]]} for line in lines.values()]


def shade(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return how a cell of the heat map looks: `held` in per cent of the strongest colour, `kind`, and its `mark`.

    Below three quarters that hold there is nothing left of that colour: most cells hold all but a few.

    >>> shade({"PASS": 90, "DEVIATION": 10}), shade({"PASS": 3, "FAIL": 1})["mark"]
    ({'held': 60, 'kind': 'mixed', 'mark': 'd10'}, '✗1')
    """
    share = counts.get("PASS", 0) / sum(counts.values())
    marks = [f"{mark}{counts[outcome]}" for outcome, mark in _MARKS.items() if counts.get(outcome)]
    is_failing = any(counts.get(outcome) for outcome in TROUBLES if outcome != "OPEN")
    held = round(100 * max(0.0, 1 - 4 * (1 - share)))
    kind = "failing" if is_failing else "strong" if held > _STRONG else "mixed"
    return {"held": held, "kind": kind, "mark": marks[0] if marks else ""}


def merged(records: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return one record of the subjects of several reports; a name that stands in several gets its file's name.

    Args:
        records: pairs of a file's name and its report; versions, profile and seed are those of the last.
    """
    last = records[-1][1]
    seen = Counter(name_of(s) for _, record in records for s in record["subjects"])
    subjects = []
    for source, record in records:
        for subject in record["subjects"]:
            name = name_of(subject)
            told = {"target": f"{name} ({source})" if seen[name] > 1 else name, "of": subject.get("target")}
            subjects.append({**subject, **told})
    canaries = [record["canaries"] for _, record in records if record.get("canaries")]
    summed = {
        "sent": sum(c["sent"] for c in canaries), "caught": sum(c["caught"] for c in canaries),
        "missed": [m for c in canaries for m in c["missed"]],
    }  # fmt: skip
    unjudged = {name: why for _, record in records for name, why in record.get("not_judged", {}).items()}
    return {**last, "subjects": subjects, "canaries": summed if canaries else None, "not_judged": unjudged}


def changes(records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return what has another outcome in a later report than in the one before that knew the same subject.

    Args:
        records: pairs of a file's name and its report, in order.

    Returns:
        Each with `name`, `id`, `from`, `before`, `to`, `after`, `reason`, and `worse`: whether it held before.
    """
    known: dict[tuple[str, str], tuple[str, str]] = {}
    found = []
    for source, record in records:
        for subject, result in results(record):
            key, after = (name_of(subject), result["id"]), result["outcome"]
            if key in known and known[key][1] != after:
                was, before = known[key]
                worse = before in ("PASS", "DEVIATION") and after in TROUBLES
                found.append({"name": key[0], "id": key[1], "from": was, "before": before, "to": source, "after": after,
                              "reason": result["reason"], "worse": worse})  # fmt: skip
            known[key] = (source, after)
    return found


def print_compliance(console: Console, table: Mapping[str, Any]) -> None:
    """Print a line a model, what fails, and the sums."""
    for row in table["rows"]:
        good = row["verdict"] in ("pass", "deviation")
        line = Text("✓ " if good else "✗ ", style="green" if good else "bold red").append(row["name"], style="bold")
        line.append(f"  {cell(row['total'])}" + (f", power {row['power']}" if row["power"] else ""), style="default")
        console.print(line)
    for trouble in table["troubles"]:
        console.print(Text(f"{trouble['outcome']} {trouble['name']} {trouble['id']}: {trouble['reason']}", style="red"))
    for name, why in table["not_judged"].items():
        console.print(Text(f"not judged: {name}: {why}", style="dim"))
    for line_of in summary(table):
        console.print(line_of, markup=False)
