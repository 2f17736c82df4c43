"""Editing a deviations file: what a run found is recorded, what it no longer needs is removed; comments stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import AoT

from veriformer.properties.known.deviations import QUESTION, Deviation
from veriformer.properties.results.records import ERROR, FAIL, LOADS, OPEN, Report, Result, SubjectReport
from veriformer.reports.records import read_text

_REQUIRED_KEYS = ("property", "subject", "reason")
_NOT_YET = "not looked into yet: "
"""How the reason begins of an entry that was written without one."""


@dataclass
class Recorded:
    """What became of a file.

    Attributes:
        text: of the file.
        added: entries that are new.
        questions: the lines to declare of the new entries that are about open questions, "" where there is none.
        changed: entries that stood there, with another reason or about more now.
        kept: entries that were written before and keep the reason that they have, though another one was given.
    """

    text: str
    added: int = 0
    questions: tuple[str, ...] = ()
    changed: int = 0
    kept: int = 0


def recorded(report: Report, text: str, reason: str | None = None, standing: Sequence[Deviation] = ()) -> Recorded:
    """Return a file with an entry for each failure, error and open question of a run that it does not excuse yet.

    A question that the run allows gets none. An entry of a question is one of a question alone: the property that
    fails later is not excused by it.

    Args:
        report: with the file's deviations applied, so that what it declares is no failure any more.
        text: of the file; "" for a new one.
        reason: of every new entry, and of those in use that were written without one; None: what the run says.
        standing: the entries that are in use in this run.
    """
    document = tomlkit.parse(text)
    tables = document.setdefault("deviation", tomlkit.aot())
    if not isinstance(tables, AoT):  # `deviation = [{...}]`: in one line, where no table can follow
        written = tomlkit.aot()
        for entry in tables:
            written.append(tomlkit.item(dict(entry)))
        document.remove("deviation")
        document["deviation"] = tables = written
    found, questions = Recorded(text), []
    if reason:
        for entry in _entries(tables, standing):
            if str(entry["reason"]).startswith(_NOT_YET):
                entry["reason"] = reason
                found.changed += 1
            else:
                found.kept += entry["reason"] != reason
    wanted = (FAIL, ERROR) if report.allow_open else (FAIL, ERROR, OPEN)
    for subject in report.subjects:
        for result in subject.results:
            if result.outcome not in wanted or result.id == LOADS:  # of no property: nothing was judged
                continue
            why = reason or f"{_NOT_YET}{result.reason}"
            if (there := _of_a_question(tables, subject, result)) is not None:  # and now it fails
                there["reason"] = why
                del there["outcome"]
                found.changed += 1
                continue
            entry = tomlkit.table()
            for key, value in zip(_REQUIRED_KEYS, (result.id, subject.target or subject.name, why), strict=True):
                entry.add(key, value)
            if result.outcome == OPEN:
                entry.add("outcome", QUESTION)
                questions.append(result.declare)
            tables.append(entry)
            found.added += 1
    found.questions = tuple(questions)
    if found.added or found.changed:
        found.text = tomlkit.dumps(document)
    return found


def _entries(tables: AoT, wanted: Sequence[Deviation]) -> list[Any]:
    keys = {(d.property, d.subject, d.reason) for d in wanted}
    return [entry for entry in tables if tuple(str(entry[k]) for k in _REQUIRED_KEYS) in keys]


def _of_a_question(tables: AoT, subject: SubjectReport, result: Result) -> Any:
    """Return the entry of this property and subject that excuses a question alone; None where there is none."""
    for entry in tables:
        is_one = entry.get("outcome") == QUESTION and "condition" not in entry
        if is_one and entry["property"] == result.id and entry["subject"] in (subject.target, subject.name):
            return entry
    return None


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
