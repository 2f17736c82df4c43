"""The page of verdicts on other seeds: it follows from the two ledgers that are kept, and tells what turned."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import loaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded("repeated_claims")


@pytest.fixture
def ledgers(script: ModuleType) -> tuple[dict[int, Any], dict[int, Any]]:
    return copy.deepcopy(script.rows(script.PUBLISHED)), copy.deepcopy(script.rows(script.REPEATED))


def test_the_page_is_what_the_two_ledgers_say(script: ModuleType, ledgers: tuple[Any, Any]) -> None:
    page = (ROOT / "reports" / "gallery" / "claims" / "repeated.md").read_text(encoding="utf-8")
    assert page == script.table(*ledgers)
    assert {24, 26, 28, 29, 33} <= ledgers[1].keys(), "what the ledger leaves open is among them"
    assert all(row["seeds"][0] >= 9000 for row in ledgers[1].values() if row["seeds"])


def test_a_verdict_that_turns_is_told(script: ModuleType, ledgers: tuple[Any, Any]) -> None:
    published, repeated = ledgers
    only = {27: repeated[27]}
    assert "1 of 1 verdicts repeat" in script.table(published, only)
    found = next(f for f in only[27]["findings"] if f["role"] == "written")
    found |= {"low": found["least"], "high": found["least"], "holds": True}
    told = script.table(published, only)
    assert "0 of 1 verdicts repeat" in told
    assert "Of the 1 that are decided both times 1 turned" in told
    assert "| holds if | holds | " + found["says"] in told


def test_seeds_of_the_ledger_and_nothing_at_all_are_refused(script: ModuleType, ledgers: tuple[Any, Any]) -> None:
    published, repeated = ledgers
    with pytest.raises(ValueError, match="claim 27 was measured on seeds 8000 to 8011"):
        script.table(published, {27: published[27]})
    with pytest.raises(ValueError, match="no claim that is drawn from seeds"):
        script.table(published, {n: row for n, row in published.items() if not row["seeds"]})
    assert repeated
