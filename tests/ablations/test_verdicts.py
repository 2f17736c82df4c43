"""Verdicts and predictions, from records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from veriformer.ablations.studies.study import Prediction, Study, Variant
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.verdicts.rows import Row, compare, describe, outcome, pace, verdict


def record(accuracy: float, area: float | None = 0.3, holds: bool | None = None) -> dict[str, Any]:
    checks = {} if holds is None else {"permutation": {"difference": 0.0, "inputs": 1, "holds": holds}}
    return {
        "accuracy": accuracy, "loss": 0.1, "loss_area": area, "max_loss": 1.0, "spikes": 0, "diverged": None,
        "steps_to_95": 10, "calibration_error": 0.01, "seconds": 1.0, "stack": 12, "lengths": {}, "checks": checks,
    }  # fmt: skip


def row(
    base: list[float], variant: list[float], *, forced: bool = False, holds: bool | None = None, tests: int = 1
) -> Row:
    """Return the first of `tests` rows of a family."""
    made = Row(TASKS["precede"], "", "v", [record(a, holds=holds) for a in variant], [record(a) for a in base], forced)
    compare([made] + [Row(TASKS["precede"], "", "w", made.base or [], made.base, False) for _ in range(tests - 1)])
    return made


ONES, HALVES = [1.0] * 12, [0.5] * 12


def test_a_loss_in_every_seed_hurts() -> None:
    assert verdict(row(ONES, HALVES)) == "hurts"
    assert verdict(row(HALVES, ONES)) == "helps"


def test_no_difference_is_equivalent() -> None:
    assert verdict(row(ONES, [0.999] * 6 + [1.0] * 6)) == "equivalent"


def test_a_certain_difference_below_one_point_is_equivalent() -> None:
    assert verdict(row(ONES, [0.998] * 12)) == "equivalent"
    assert verdict(row(ONES, [0.98] * 12)) == "hurts"


def test_two_dead_of_twelve_are_no_evidence() -> None:
    assert verdict(row(ONES, [0.5] * 2 + [1.0] * 10)) == "no evidence"


def test_a_family_asks_for_more() -> None:
    seven = [0.5] * 7 + [1.0] * 5  # p = 2 / 2^7 = 0.016
    assert verdict(row(ONES, seven)) == "hurts"
    assert verdict(row(ONES, seven, tests=4)) == "no evidence"


def test_few_seeds_never_say_no_effect() -> None:
    assert verdict(row([1.0] * 4, [1.0] * 4)) == "too few seeds"
    assert verdict(row([1.0] * 4, [0.5] * 4)) == "too few seeds"


def test_a_theorem_is_checked_not_tested() -> None:
    assert verdict(row(ONES, HALVES, forced=True, holds=True)) == "forced"
    assert verdict(row(ONES, HALVES, forced=True, holds=False)) == "theorem violated"
    assert row(ONES, HALVES, forced=True, holds=True).accuracy_holm != row(ONES, HALVES).accuracy_holm


def test_at_the_ceiling_the_loss_area_speaks() -> None:
    slow = Row(
        TASKS["precede"], "", "v", [record(1.0, 0.5) for _ in range(12)], [record(1.0, 0.3) for _ in range(12)], False
    )
    compare([slow])
    assert verdict(slow) == "equivalent"
    assert slow.at_ceiling
    assert pace(slow) == "slower"


def test_a_loss_that_was_not_finite_counts_as_a_large_one() -> None:
    lost = Row(
        TASKS["precede"], "", "v", [record(0.5, None) for _ in range(12)], [record(1.0) for _ in range(12)], False
    )
    compare([lost])
    assert pace(lost) == "slower"


STUDY = Study(
    name="s",
    question="?",
    source="",
    config={},
    recipe=Recipe(),
    variants=(Variant("b"), Variant("v")),
    tasks=("precede",),
)


@pytest.mark.parametrize(
    ("expects", "variant", "found"),
    [
        ("hurts", HALVES, "confirmed"),
        ("helps", HALVES, "contradicted"),
        ("equivalent", HALVES, "contradicted"),
        ("equivalent", ONES, "confirmed"),
        ("hurts", ONES, "contradicted"),
        ("hurts", [0.5] * 2 + [1.0] * 10, "undecided"),
        ("chance", HALVES, "confirmed"),
        ("chance", ONES, "contradicted"),
        ("slower", ONES, "undecided"),
        ("depends", HALVES, "undecided"),
    ],
)
def test_predictions(expects: str, variant: list[float], found: str) -> None:
    assert outcome(Prediction("v", expects, ""), row(ONES, variant)) == found


def test_dead_seeds_are_told_beside_the_mean() -> None:
    told = describe(row(ONES, [0.5] * 6 + [1.0] * 6), 2, STUDY)
    assert told["dead"]["count"] == 6
    assert told["dead_p"] == pytest.approx(0.0137, abs=1e-4)  # Fisher: 0 of 12 against 6 of 12
    assert told["accuracy"][0] == 0.75
    assert told["probability_of_improvement"] == 0.75
    assert told["difference"][0] == -0.25


def test_an_unknown_expectation_is_refused() -> None:
    with pytest.raises(ValueError, match="'better'; it must be one of hurts, helps"):
        Prediction("v", "better", "")
