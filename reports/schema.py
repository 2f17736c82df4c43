"""The published form of a report, `report.schema.json`; what is read is held against it first."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from veriformer.reports.records import RecordError, read_json
from veriformer.reports.verdicts import name_of, results

SCHEMA_FILE = Path(__file__).parent / "report.schema.json"


@functools.cache
def validator() -> Draft202012Validator:
    """Return the validator of `veriformer-report/1`."""
    return Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def insist(record: Mapping[str, Any], source: str) -> None:
    """Raise unless a record is a whole report.

    Args:
        record: parsed JSON; nothing in it is executed.
        source: where it came from, for the message.

    Raises:
        RecordError: with the first thing that is wrong, and where.
    """
    problem = best_match(validator().iter_errors(record))
    if problem is not None:
        told = problem.message if len(problem.message) < 200 else f"{problem.message[:200]} ..."
        raise RecordError(f"{source} is no veriformer-report/1: at {problem.json_path}: {told}")
    for subject, result in results(record):
        shown = (result.get("counterexample") or {}).get("influence")
        if shown and [*map(len, shown["magnitude"])] != [*map(len, shown["allowed"])]:
            told = f"the influence map of {result['id']} on {name_of(subject)}"
            raise RecordError(
                f"{source} is no veriformer-report/1: {told} has rows of other lengths than what is allowed"
            )


def is_subject(record: object) -> bool:
    """Whether a record is that of a subject, as a report holds it."""
    held = {"schema": "veriformer-report/1", "versions": {}, "seed": 0, "profile": "quick", "device": "cpu"}
    try:
        insist({**held, "subjects": [record]}, "it")
    except (RecordError, RecursionError):
        return False
    return True


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        RecordError: the file is missing, truncated, edited or something else.
    """
    record = read_json(path)
    insist(record, str(path))
    return record
