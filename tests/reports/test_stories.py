"""Failures as stories: grouped by cause, the simplest told, one picture; a report that shows itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broken_models import LEAKY
from veriformer.properties import check
from veriformer.properties.results.records import Report
from veriformer.reports.failure import failure_text
from veriformer.reports.stories import error_of, stories
from veriformer.reports.verdicts import shown_in_full, told_by

MAP = {"magnitude": [[1.0, 1.0], [1.0, 1.0]], "allowed": [[True, False], [True, True]]}


def failure(name: str, cause: str, length: int, influence: Any = None) -> dict[str, Any]:
    case = {"id": "ab12cd34", "choices": {"T": length, "B": 1, "seed": 9000}, "sizes": "", "headline": "so",
            "index": [], "got": "1", "expected": "2", "error": 1.0, "tolerance": 0.0, "path": "", "cause": cause,
            "influence": influence, "script": ""}  # fmt: skip
    return {"id": name, "level": "core", "outcome": "FAIL", "reason": "so", "margin": None, "counterexample": case}


SUBJECT = {
    "results": [
        failure("loss.mean", "", 1),
        failure("anatomy.mask", "the mask begins 1 later", 1),
        failure("causality.prefix", "the mask is off by 1", 7, MAP),
        failure("causality.first", "the mask is off by 2", 2),
        failure("norm.definition", "the epsilon is 1e-3", 1),
    ]
}


def test_failures_of_one_cause_are_one_story_told_by_the_simplest_with_the_picture_of_another() -> None:
    mask, norm, unknown = sorted(stories(SUBJECT), key=lambda s: "mask" not in s.case["cause"])
    assert mask.told["id"] == "causality.prefix", "a picture is worth more than a shorter case"
    assert [r["id"] for r in mask.others] == ["causality.first", "anatomy.mask"]
    assert mask.case["influence"] is MAP
    assert mask.case["cause"] == "the mask is off by 1; seen inside: the mask begins 1 later"
    assert (norm.told["id"], unknown.told["id"]) == ("norm.definition", "loss.mean")
    assert stories(SUBJECT)[-1].case["cause"] == "", "what names no cause comes last"


def test_a_picture_of_another_failure_is_lent_to_the_one_that_is_told() -> None:
    small, large = failure("a.a", "x", 1), failure("a.b", "x", 9, MAP)
    small["counterexample"]["influence"] = None
    (story,) = stories({"results": [small, large]})
    assert story.case["influence"] is MAP
    assert told_by({"results": [small, large]}) == {story.told["id"]: [r["id"] for r in story.others]}
    assert [r["id"] for r in shown_in_full({"results": [small, large]})] == [story.told["id"]]


def test_answers_that_change_lead_and_have_one_story() -> None:
    left_on = "dropout acts in eval mode"
    places = failure("dropout.places", "", 1)
    places["counterexample"]["headline"] = left_on
    results = [
        failure("causality.prefix", f"{left_on}, at a rate of 0.1", 1, MAP),
        failure("norm.definition", "the epsilon is 1e-3", 1, MAP),
        places,
        failure("numerics.stateless", f"{left_on}, at a rate of 0.1", 1),
        failure("dropout.eval-deterministic", left_on, 1),
    ]
    first, second = stories({"results": results})
    assert first.told["id"] == "dropout.eval-deterministic"
    assert first.case["cause"] == f"{left_on}, at a rate of 0.1"
    assert {r["id"] for r in first.others} == {"causality.prefix", "dropout.places", "numerics.stateless"}
    assert second.told["id"] == "norm.definition"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({"got": "7", "expected": "2", "unit": "0.5, their size"}, "; 5 apart, counted in 0.5, their size"),
        ({"got": "12", "expected": "2", "unit": "0.5, their size"}, ""),
        ({"got": "7", "expected": "at least 2", "unit": "standard errors"}, "; counted in standard errors"),
        ({"got": "7", "expected": "2"}, ""),
    ],
)
def test_an_error_is_explained_where_it_is_not_the_difference_of_what_is_shown(case: dict[str, str], told: str) -> None:
    assert error_of({"error": 10.0, "tolerance": 0.1, **case}) == f"10, tolerance 0.1, 100 times as much{told}"


@pytest.fixture(scope="module")
def report() -> Report:
    return check(LEAKY, profile="quick", only=["causality", "anatomy"])


def test_a_report_shows_itself_on_a_screen_and_in_a_notebook(report: Report) -> None:
    text = repr(report)
    assert len(text) < 5000
    assert max(map(len, text.splitlines())) <= 80
    assert "likely    one change makes it right: `return TinyLanguageModel(config," in text
    assert "influence exactly one step ahead: the mask's diagonal is off by one" in " ".join(text.split())
    assert text.count("influence   of input s") == 1
    assert "causality.first-token, anatomy.mask fail of" in " ".join(text.split())
    assert report._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')


def test_a_report_is_saved_with_its_scripts_and_git_leaves_them_alone(report: Report, tmp_path: Path) -> None:
    files = report.save(tmp_path / "saved")
    assert {"report.json", "report.html", "report.md", "junit.xml", "badge.svg"} <= {f.name for f in files}
    scripts = [f for f in files if f.suffix == ".py"]
    assert {f.parent.name for f in scripts} == {".veriformer"}
    failing = {r.counterexample.id for r in report.results if r.counterexample and r.counterexample.script}
    assert {f.stem for f in scripts} == failing
    assert (tmp_path / "saved" / ".veriformer" / ".gitignore").read_text() == "*\n"


def test_what_applies_is_stated_in_the_record(report: Report) -> None:
    record = report.to_json()
    ids = {r.id for r in report.results if r.outcome != "NOT_APPLICABLE"}
    assert set(record["properties"]) == ids
    assert record["properties"]["causality.first-token"]["statement"].startswith("The first output is a function")


def test_the_text_of_one_failure_says_how_to_see_it_again() -> None:
    told = failure_text(failure("a.b", "the mask", 3, MAP), "It holds.", "mine", again="veriformer replay ab12cd34")
    assert "Not so for mine: so." in told
    assert "  again     veriformer replay ab12cd34" in told
    assert "0 ■ x" in told
