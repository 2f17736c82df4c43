"""Every form of a report: valid against the schema, accepted by stock tools, the same from a file as from a run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml

from broken_models import build_leaky
from hostile.samples import REPORT
from veriformer.properties import Subject, check
from veriformer.properties.results.reading import report_of, whole
from veriformer.properties.results.records import plain
from veriformer.reports.badge import badge
from veriformer.reports.formats import FORMATS, stable, write_all
from veriformer.reports.junit import junit
from veriformer.reports.readable import cleaned
from veriformer.reports.records import RecordError
from veriformer.reports.report_page import markdown, page
from veriformer.reports.schema import insist, read_report, validator
from veriformer.reports.verdicts import unrepeated

LEAKY = Subject(
    kind="decoder",
    name="<leaky> & \x07 co.",
    build=build_leaky,
    declares={"causal": True},
)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return check(LEAKY, profile="quick", only=["causality", "parameters", "loss"]).to_json()


def test_a_report_is_valid_against_the_published_schema(record: dict[str, Any]) -> None:
    validator().check_schema(validator().schema)
    insist(record, "it")
    insist(stable(record), "it, without times")
    assert any(r["counterexample"] for s in record["subjects"] for r in s["results"])


def test_a_report_is_read_back_as_it_was(record: dict[str, Any]) -> None:
    again = report_of(json.loads(json.dumps(record)))
    assert [plain(s) for s in again.subjects] == record["subjects"]
    assert again.exit_status == 1


def test_what_changes_from_run_to_run_can_be_left_out(record: dict[str, Any]) -> None:
    again = check(LEAKY, profile="quick", only=["causality", "parameters", "loss"]).to_json()
    assert json.dumps(stable(again)) == json.dumps(stable(record))
    assert "seconds" not in json.dumps(stable(record))


def test_a_stock_parser_accepts_the_junit_file(record: dict[str, Any], tmp_path: Path) -> None:
    write_all(record, tmp_path)
    suites = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    results = [r for s in record["subjects"] for r in s["results"]]
    assert suites.tests == len(results)
    assert suites.failures == sum(r["outcome"] == "FAIL" for r in results) > 0
    assert suites.skipped == sum(r["outcome"] == "NOT_APPLICABLE" for r in results) > 0
    names = {case.name for suite in suites for case in suite}
    assert names == {r["id"] for r in results}


def test_a_void_run_is_an_error_in_every_form(record: dict[str, Any]) -> None:
    void = copy.deepcopy(record)
    void["canaries"]["missed"] = ["a canary sings"]
    assert "the run is void: a canary sings" in junit(void)
    assert ">void<" in badge(void)
    assert "Void" in page(void)
    assert "Void" in markdown(void)


def test_the_badge_counts_core_properties(record: dict[str, Any]) -> None:
    core = [r for s in record["subjects"] for r in s["results"] if r["level"] == "core"]
    judged = [r for r in core if r["outcome"] != "NOT_APPLICABLE"]
    svg = badge(record)
    ElementTree.fromstring(svg)
    assert f"core {sum(r['outcome'] == 'PASS' for r in judged)}/{len(judged)}" in svg


def test_a_known_deviation_is_no_pass_of_the_badge(record: dict[str, Any]) -> None:
    known = copy.deepcopy(record)
    failing = [r for s in known["subjects"] for r in s["results"] if r["outcome"] == "FAIL" and r["level"] == "core"]
    before = badge(known).partition("core ")[2].partition("/")[0]
    failing[0]["outcome"] = "DEVIATION"
    assert f"core {before}/" in badge(known)
    assert badge(known).count(" pass, 1 known deviation") == 3  # the title, its label and the letters
    assert f"Core properties that hold: {before} of " in page(known)
    assert ", with 1 known deviation of all" in page(known)
    failing[1]["outcome"] = "DEVIATION"
    assert " pass, 2 known deviations" in badge(known)


def test_names_are_escaped_wherever_they_stand(record: dict[str, Any]) -> None:
    for _, make in FORMATS.values():
        assert "<leaky>" not in make(record, unrepeated) or make is FORMATS["json"][1] or make is FORMATS["markdown"][1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.update(schema="veriformer-report/9"), r"\$\.schema"),
        (lambda r: r["subjects"][0]["results"][0].update(outcome="MAYBE"), r"\$\.subjects\[0\]\.results\[0\]\.outcome"),
        (lambda r: r["subjects"][0].pop("results"), r"\$\.subjects\[0\]: 'results' is a required property"),
        (lambda r: r.update(subjects=7), r"\$\.subjects"),
        (lambda r: r["subjects"][0]["results"][0].update(margin="__import__('os')"), "margin"),
        (lambda r: r.update(command="rm"), "'command' was unexpected"),
    ],
)
def test_an_edited_report_gets_one_clear_sentence(
    record: dict[str, Any], tmp_path: Path, change: Any, told: str
) -> None:
    edited = copy.deepcopy(record)
    change(edited)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(edited))
    with pytest.raises(RecordError, match=told) as caught:
        read_report(path)
    assert "\n" not in str(caught.value)


def test_a_truncated_report_gets_one_clear_sentence(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(record)[:-100])
    with pytest.raises(RecordError, match="is truncated or was edited"):
        read_report(path)


def test_what_a_valid_report_may_leave_out_is_filled_in(record: dict[str, Any]) -> None:
    small = {
        **{k: record[k] for k in ("schema", "versions", "seed", "profile", "device")},
        "subjects": [
            {
                "name": "mine",
                "kind": "layer",
                "power": None,
                "results": [{"id": "a.b", "level": "core", "outcome": "PASS", "reason": "", "margin": None}],
            }
        ],
    }
    insist(small, "it")
    assert "a.b" in page({**whole(small), "properties": {"a.b": {"statement": "It holds."}}})
    assert "a.b" in page({name: told for name, told in whole(small).items() if name != "properties"})
    for _, make in FORMATS.values():
        assert make(whole(small), unrepeated)


def test_what_is_printed_is_folded_escaped_and_counted() -> None:
    nasty = "</pre></details><script>alert(1)</script>\n\n`|\x1b[31m"
    record = json.loads(json.dumps(REPORT))
    (subject,) = record["subjects"]
    subject["printed"] = {"size": 70_000, "text": f"first\n{'x' * 60_000}\n{nasty}"}
    told = cleaned(record)
    for shown, dropped in ((page(told), 70_000 - 2**16), (markdown(told), None)):
        assert "<script>alert" not in shown
        assert "\x1b" not in shown
        assert "&lt;/pre&gt;&lt;/details&gt;&lt;script&gt;" in shown
        assert "printed 70,000 bytes" in shown
        assert dropped is None or f"the first {dropped:,} are left out" in shown
        assert "mine printed 70,000 bytes" in shown
    assert "first\n" in page(told)
    assert "first\n" not in markdown(told)
    left_out = 4464 + len(told["subjects"][0]["printed"]["text"]) - 4096
    assert f"the first {left_out:,} are left out" in markdown(told)
    for silent in (None, {"size": 2, "text": "ab"}):
        subject["printed"] = silent
        assert ("printed 2 bytes" in markdown(record)) == ("printed 2 bytes" in page(record)) == bool(silent)
        assert "left out" not in markdown(record)
