"""From the JSON of a report back to its records. Plain data in, plain data out: nothing is executed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from veriformer.properties.results.records import Counterexample, Report, Result, SubjectReport, plain

_NUMBERS = ("error", "tolerance", "margin")


def result_of(record: Mapping[str, Any]) -> Result:
    """Return the result that `plain` made a record of."""
    fields = _with_numbers(record)
    case = fields.pop("counterexample", None)
    return Result(**fields, counterexample=Counterexample(**_with_numbers(case)) if case else None)


def subject_of(record: Mapping[str, Any]) -> SubjectReport:
    """Return the report of a subject that `plain` made a record of."""
    return SubjectReport(**{**record, "results": [result_of(r) for r in record["results"]]})


def report_of(record: Mapping[str, Any]) -> Report:
    """Return the report that `Report.to_json` made a record of; the record must be a valid one."""
    return Report(
        [subject_of(s) for s in record["subjects"]], record["seed"], record["profile"], record["device"],
        dict(record["versions"]), record.get("seconds", 0.0), record.get("canaries"),
        record.get("allow_open", False), dict(record.get("properties", {})),
    )  # fmt: skip


def whole(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a valid report with every field that it may leave out, as a run would have written it."""
    return {
        "canaries": None,
        "allow_open": False,
        "not_judged": {},
        "properties": {},
        **record,
        "subjects": [plain(s) for s in report_of(record).subjects],
    }


def _with_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give back the NaN and infinities that JSON has no word for."""
    return {k: math.nan if v is None and k in _NUMBERS else v for k, v in record.items()}
