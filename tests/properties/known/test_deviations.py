"""Deviations: conditions, expiry on the day, and entries of which nothing was found."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from veriformer.properties.known.applying import apply_deviations, stale, standing
from veriformer.properties.known.deviations import DeviationsError, read_deviations
from veriformer.properties.known.editing import recorded
from veriformer.properties.results.records import LOADS, Report, Result, SubjectReport
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
    unneeded, unknown = stale(judged, known)
    assert ([e.subject for e in unneeded], unknown) == (["gone"], 0)
    assert stale(judged, known, all_subjects=False) == ([], 1)


@pytest.mark.parametrize("found", ["BLOCKED", "TIMEOUT", "VACUOUS", "ERROR", None])
def test_what_was_not_judged_is_not_stale(tmp_path: Path, found: str | None) -> None:
    known = read_deviations(written(tmp_path, ENTRY + 'outcome = "open"\n'))
    judged = report(found or "PASS")
    if found is None:
        judged.subjects[0].results[0].id = "a.other"
    apply_deviations(judged, known)
    assert stale(judged, known) == ([], 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_entry_of_what_another_deviation_holds_back_stays_whatever_their_order(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    entries = [ENTRY, ENTRY.replace("a.b", "a.c")]
    known = read_deviations(written(tmp_path, "".join(entries[i] for i in order)))
    judged = report()
    judged.subjects[0].results.append(Result("a.c", "core", "BLOCKED", "a.b must hold first and does not"))
    apply_deviations(judged, known)
    assert [r.outcome for r in judged.results] == ["DEVIATION", "NOT_APPLICABLE"]
    assert stale(judged, known) == ([], 1)


@pytest.mark.parametrize(("found", "becomes"), [("OPEN", "DEVIATION"), ("FAIL", "FAIL"), ("PASS", "UNEXPECTED_PASS")])
def test_an_entry_of_a_question_excuses_a_question_alone(tmp_path: Path, found: str, becomes: str) -> None:
    judged, known = report(found), read_deviations(written(tmp_path, ENTRY + 'outcome = "open"\n'))
    apply_deviations(judged, known)
    assert judged.results[0].outcome == becomes
    assert judged.exit_status == (becomes != "DEVIATION")
    assert len(stale(judged, known)[0]) == (becomes != "DEVIATION")


def test_a_question_is_recorded_and_fails_anew_once_it_is_a_failure(tmp_path: Path) -> None:
    asked = report("OPEN")
    path = written(tmp_path, recorded(asked, "").text)
    assert 'outcome = "open"' in path.read_text()
    failing, known = report(), read_deviations(path)
    apply_deviations(failing, known)
    done = recorded(failing, path.read_text(), "looked into")
    assert (done.added, done.changed) == (0, 1)
    apply_deviations(failing, read_deviations(written(tmp_path, done.text)))
    assert (failing.results[0].outcome, failing.results[0].reason) == ("DEVIATION", "looked into")
    asked.allow_open = True
    assert recorded(asked, "").added == 0


def test_a_late_reason_replaces_what_was_not_looked_into_and_no_reason_of_a_person(tmp_path: Path) -> None:
    judged = report()
    path = written(tmp_path, recorded(judged, "# ours\n").text)
    known = read_deviations(path)
    assert known.entries[0].reason == "not looked into yet: it broke"
    apply_deviations(judged, known)
    done = recorded(judged, path.read_text(), "as in the paper", standing(judged, known))
    assert (done.added, done.changed, done.kept) == (0, 1, 0)
    known = read_deviations(written(tmp_path, done.text))
    assert (known.entries[0].reason, done.text.splitlines()[0]) == ("as in the paper", "# ours")
    again = recorded(judged, done.text, "another", standing(judged, known))
    assert (again.text, again.changed, again.kept) == (done.text, 0, 1)


def test_an_outcome_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviationsError, match="outcome was 'opn'; write \"open\" where the entry excuses an open"):
        read_deviations(written(tmp_path, ENTRY + 'outcome = "opn"\n'))


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


def test_a_target_that_cannot_be_loaded_gets_no_entry() -> None:
    judged = report("ERROR")
    judged.results[0].id = LOADS
    assert recorded(judged, "").added == 0


@pytest.mark.parametrize(
    ("other", "becomes", "is_stale"), [("FAIL", "NOT_APPLICABLE", 0), ("PASS", "UNEXPECTED_PASS", 1)]
)
def test_what_does_not_apply_for_a_failure_elsewhere_keeps_its_entry(
    tmp_path: Path, other: str, becomes: str, is_stale: int
) -> None:
    judged, known = report("NOT_APPLICABLE"), read_deviations(written(tmp_path, ENTRY))
    judged.subjects[0].results.append(Result("a.c", "core", other, "a mask was lost"))
    apply_deviations(judged, known)
    assert judged.results[0].outcome == becomes
    unneeded, unknown = stale(judged, known)
    assert (len(unneeded), unknown) == (is_stale, 1 - is_stale)
