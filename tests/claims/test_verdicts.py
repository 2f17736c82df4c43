"""The rule from findings to verdicts, and the ledger that is published."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from veriformer.claims.claim import ledger
from veriformer.claims.coverage import SYSTEMS
from veriformer.claims.exercises import EXERCISES, answered
from veriformer.claims.finding import Finding, verdict
from veriformer.claims.running import gathered, judged_again

LEDGER = Path(__file__).parents[2] / "reports" / "gallery" / "claims" / "claims.json"
PUBLISHED: dict[str, Any] = json.loads(LEDGER.read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = PUBLISHED["claims"]


def finding(role: str, low: float, high: float | None = None, **limits: float) -> Finding:
    return Finding(says="a number", role=role, low=low, high=low if high is None else high, **(limits or {"most": 1.0}))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([finding("written", 0.5)], "holds"),
        ([finding("written", 0.5), finding("written", 2.0)], "undecided"),
        ([finding("written", 2.0), finding("restricted", 0.5)], "holds if"),
        ([finding("written", 2.0), finding("restricted", 2.0)], "undecided"),
        ([finding("written", 2.0), finding("corrected", 0.5)], "refuted"),
        ([finding("written", 2.0), finding("corrected", 0.5), finding("corrected", 0.5, 1.5)], "undecided"),
        ([finding("written", 0.5, 1.5), finding("corrected", 0.5)], "undecided"),
        ([finding("written", math.nan)], "undecided"),
        ([finding("corrected", 0.5)], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_verdict_follows_from_the_findings(found: list[Finding], expected: str) -> None:
    assert verdict(found) == expected


def test_what_cannot_be_tested_says_why() -> None:
    assert verdict([], reason="no machine is large enough") == "not testable here"


def test_a_finding_that_could_not_come_out_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="'a number' could not come out otherwise; give `least`, `most` or both"):
        Finding(says="a number", role="written", low=0, high=0)


def test_the_ledger_has_every_claim_once() -> None:
    assert list(ledger()) == list(range(1, 72))
    assert [row["number"] for row in ROWS] == list(ledger())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"claim-{row['number']}")
def test_a_published_verdict_is_the_one_that_its_findings_give(row: dict[str, Any]) -> None:
    assert judged_again(row) == row["verdict"]
    assert row["statement"] == ledger()[row["number"]].statement


def test_a_published_ledger_says_which_systems_it_covers() -> None:
    assert [s["name"] for s in PUBLISHED["systems"]] == [s.name for s in SYSTEMS]


def test_an_exercise_is_answered_by_the_verdict_of_its_claim() -> None:
    rows = {row["number"]: row for row in ROWS}
    assert [e["name"] for e in answered(rows)] == [e.name for e in EXERCISES]
    refuted = {**rows[27], "verdict": "refuted", "corrected": "it rises"}
    told = next(e for e in answered({**rows, 27: refuted}) if e["name"] == "Remove positional encoding")
    assert told["answers"][0] == "No: it rises"


def test_a_claim_whose_gathering_fails_is_undecided_and_says_why() -> None:
    def broken(see: object) -> None:
        raise ValueError("no such table")

    row = gathered(replace(ledger()[1], gather=broken))
    assert (row["verdict"], row["problem"]) == ("undecided", "ValueError: no such table")
