"""Deviations: conditions, expiry on the day, and entries of which nothing was found."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from veriformer.properties.known.deviations import DeviationsError, apply_deviations, read_deviations, stale
from veriformer.properties.results.records import Report, Result, SubjectReport
from veriformer.reports.reach import reach
from veriformer.reports.report_page import markdown, page

ENTRY = '[[deviation]]\nproperty = "a.b"\nsubject = "mine"\nreason = "because"\n'


def report(outcome: str = "FAIL") -> Report:
    results = [Result("a.b", "core", outcome, "it broke")]
    return Report([SubjectReport("mine", "layer", results=results)], 0, "quick", versions={"torch": "2.13.0"})


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "deviations.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("condition", "outcome"),
    [("", "DEVIATION"), ('torch = "2.13"', "DEVIATION"), ('torch = "2.12"', "FAIL"), ('device = "cuda"', "FAIL")],
)
def test_a_deviation_counts_where_its_condition_fits(tmp_path: Path, condition: str, outcome: str) -> None:
    judged = report()
    apply_deviations(judged, read_deviations(written(tmp_path, ENTRY + f"condition = {{ {condition} }}\n")))
    assert judged.results[0].outcome == outcome


def test_a_link_is_shown_with_the_reason(tmp_path: Path) -> None:
    judged = report()
    apply_deviations(judged, read_deviations(written(tmp_path, ENTRY + 'link = "https://example.org/1"\n')))
    assert judged.results[0].reason == "because (https://example.org/1)"


def test_an_entry_expires_after_its_day(tmp_path: Path) -> None:
    path = written(tmp_path, ENTRY + "expires = 2027-01-31\n")
    read_deviations(path, datetime.date(2027, 1, 31))
    with pytest.raises(DeviationsError, match=r"of 'mine' from 'a\.b' expired on 2027-01-31; look at it again"):
        read_deviations(path, datetime.date(2027, 2, 1))


def test_entries_that_match_nothing_are_found(tmp_path: Path) -> None:
    known = read_deviations(written(tmp_path, ENTRY + ENTRY.replace("mine", "gone")))
    judged = report()
    apply_deviations(judged, known)
    assert [e.subject for e in stale(judged, known)] == ["gone"]


def test_what_a_deviation_holds_back_is_said_beside_power_and_reach(tmp_path: Path) -> None:
    judged = report()
    judged.subjects[0].results += [
        Result("a.c", "core", "BLOCKED", "a.b must hold first and does not"),
        Result("a.d", "core", "BLOCKED", "a.c must hold first and does not"),
        Result("a.e", "core", "PASS"),
    ]
    judged.subjects[0].power = {"noticed": 1, "tried": 1, "missed": [], "faults": []}
    apply_deviations(judged, read_deviations(written(tmp_path, ENTRY)))
    told = "without 2 properties that a deviation from a.b holds back"
    assert "BLOCKED" not in {r.outcome for r in judged.results}
    assert f"power 1/1, {told}" in " ".join(repr(judged).split())
    record = judged.to_json()
    assert told in reach(record["subjects"][0])
    assert told in page(record)
    assert f"1/1 {told}" in markdown(record)


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviationsError, match="an entry has no 'reason'; every entry needs property, subject, reason"):
        read_deviations(written(tmp_path, ENTRY.replace('"because"', '" "')))
