"""Editing a deviations file: what a run found is recorded, what it no longer needs is removed; comments stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tomlkit
from tomlkit.items import AoT

from veriformer.properties.known.deviations import Deviation
from veriformer.properties.results.records import ERROR, FAIL, Report
from veriformer.reports.records import read_text

_REQUIRED_KEYS = ("property", "subject", "reason")


def recorded(report: Report, text: str, reason: str | None = None) -> tuple[str, int]:
    """Return the text of a file with one entry more for each failure or error of a run, and how many these are.

    Args:
        report: with the file's deviations applied, so that what it declares is no failure any more.
        text: of the file; "" for a new one.
        reason: of every new entry; None: what the run says.
    """
    document = tomlkit.parse(text)
    tables = document.setdefault("deviation", tomlkit.aot())
    if not isinstance(tables, AoT):  # `deviation = [{...}]`: in one line, where no table can follow
        written = tomlkit.aot()
        for entry in tables:
            written.append(tomlkit.item(dict(entry)))
        document.remove("deviation")
        document["deviation"] = tables = written
    count = 0
    for subject in report.subjects:
        for result in subject.results:
            if result.outcome not in (FAIL, ERROR):
                continue
            entry = tomlkit.table()
            values = (result.id, subject.target or subject.name, reason or f"not looked into yet: {result.reason}")
            for key, value in zip(_REQUIRED_KEYS, values, strict=True):
                entry.add(key, value)
            tables.append(entry)
            count += 1
    return (tomlkit.dumps(document) if count else text), count


def pruned(text: str, unneeded: Sequence[Deviation]) -> tuple[str, int]:
    """Return the text of a file without the entries that excuse nothing, and how many these are."""
    document = tomlkit.parse(text)
    tables = document.get("deviation", [])
    keys = {(d.property, d.subject, d.reason) for d in unneeded}
    gone = [i for i, entry in enumerate(tables) if tuple(str(entry[k]) for k in _REQUIRED_KEYS) in keys]
    for index in reversed(gone):
        del tables[index]
    if "deviation" in document and not len(tables):
        document.remove("deviation")
    return (tomlkit.dumps(document) if gone else text), len(gone)


def read_or_empty(path: Path) -> str:
    """Return the text of a file, "" if there is none yet."""
    return read_text(path) if path.exists() else ""
