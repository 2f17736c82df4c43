"""Every form of a report, by name: one table, for `check --out`, `report` and whoever else writes one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from veriformer.reports.badge import badge
from veriformer.reports.junit import junit
from veriformer.reports.records import CASES, hide_from_git, write_text
from veriformer.reports.report_page import markdown, page
from veriformer.reports.verdicts import Repeat, results, unrepeated

_ID = re.compile("[0-9a-f]+")  # of a case: whatever else a stored record says is no name of a file
_CHANGING = {"seconds", "subject_seconds", "environment", "printed"}


def as_json(record: Mapping[str, Any]) -> str:
    """Return the report as JSON."""
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


FORMATS: Mapping[str, tuple[str, Callable[[Mapping[str, Any], Repeat], str]]] = {
    "json": ("report.json", lambda record, _: as_json(record)),
    "html": ("report.html", page),
    "markdown": ("report.md", markdown),
    "junit": ("junit.xml", junit),
    "badge": ("badge.svg", lambda record, _: badge(record)),
}
"""Format to the name of its file and what makes it."""


def write_all(record: Mapping[str, Any], folder: Path, repeat: Repeat = unrepeated) -> list[Path]:
    """Write a report in every format; each file is whole or not there.

    Args:
        record: under `veriformer-report/1`.
        folder: of the files.
        repeat: the commands that show a case again.
    """
    written = []
    for name, make in FORMATS.values():
        write_text(folder / name, make(record, repeat))
        written.append(folder / name)
    return written


def write_scripts(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the script of each failure that has one, into `.veriformer` below the folder, which git leaves alone."""
    cases = [case for _, r in results(record) if (case := r.get("counterexample")) and _ID.fullmatch(case["id"])]
    scripts = {folder / CASES / f"{case['id']}.py": case["script"] for case in cases if case.get("script")}
    for path, script in scripts.items():
        write_text(path, script)
    if scripts:
        hide_from_git(folder / CASES)
    return list(scripts)


def stable(record: Any) -> Any:
    """Return a report without what changes from run to run: times, and the machine."""
    if isinstance(record, Mapping):
        return {key: stable(value) for key, value in record.items() if key not in _CHANGING}
    return [stable(value) for value in record] if isinstance(record, list) else record
