"""What is made of rows beside accuracy: laws that are doubted, calibration, other lengths, entropy, shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from veriformer.ablations.statistics.answers import calibration, entropy, lengths, scaling_law, shapes
from veriformer.ablations.statistics.fits import check_power, lack_of_fit, laws
from veriformer.ablations.studies.study import Expectation, Study, Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.verdicts.beside import answer, beside

X = [10.0 * 2**k for k in range(7)]
SEEDS = 12


def _noisy(means: list[float], spread: float = 0.05) -> list[list[float]]:
    draws = np.random.default_rng(0).normal(0, spread, (len(means), 4))
    return [[m * math.exp(e) for e in row] for m, row in zip(means, draws, strict=True)]


def test_a_power_law_is_found_with_its_exponent() -> None:
    fit = check_power(X, _noisy([3 * x**-0.4 for x in X]))
    assert fit["is_power_law"]
    # four standard errors of the slope of seven means, each of spread 0.05 / sqrt(4)
    assert fit["exponent"] == pytest.approx(-0.4, abs=0.03)
    assert fit["lack_of_fit"] > 0.001


def test_a_plateau_and_a_cliff_is_no_power_law() -> None:
    fit = check_power(X, _noisy([1.6, 1.6, 1.6, 1.6, 0.1, 0.01, 0.001]))
    assert not fit["is_power_law"]
    assert fit["lack_of_fit"] < 0.001
    assert fit["missed"] > 0.5
    assert min(fit["laws"], key=fit["laws"].get) == "plateau and cliff"
    assert min(fit["local"]) < -3
    assert abs(fit["local"][0]) < 0.2


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("power", lambda x: 3 * x**-0.7),
        ("exponential", lambda x: 2 * math.exp(-0.01 * x)),
        ("power above a floor", lambda x: 20 * x**-1.2 + 0.3),
    ],
)
def test_the_law_that_made_the_points_is_the_best(name: str, law: Any) -> None:
    criteria = laws(X, _noisy([law(x) for x in X], spread=0.02))
    assert min(criteria, key=criteria.__getitem__) == name


def test_a_power_law_is_not_rejected_more_often_than_its_level() -> None:
    rng, runs = np.random.default_rng(5), 200
    wrong = sum(
        lack_of_fit(X, [[x**-0.5 * math.exp(e) for e in rng.normal(0, 0.2, 4)] for x in X]) < 0.05 for _ in range(runs)
    )
    # 99.9 % of binomial(200, 0.05) lies at or below 21, and 0.1 % below 2
    assert 1 <= wrong <= 21


def test_lack_of_fit_wants_repeats() -> None:
    with pytest.raises(ValueError, match="3 values at 3 points were given; at least 3 points and one repeat"):
        lack_of_fit([1, 2, 3], [[1.0], [2.0], [3.0]])


def test_seeds_without_spread_leave_nothing_to_chance() -> None:
    assert lack_of_fit([1, 2, 4], [[1.0] * 2, [2.0] * 2, [9.0] * 2]) == 0
    assert lack_of_fit([1, 2, 4], [[1.0] * 2, [2.0] * 2, [4.0] * 2]) == 1


def _row(variant: str, of_seeds: dict[str, Any], accuracy: float = 0.9, **more: Any) -> dict[str, Any]:
    base = {"task": "t", "setting": "", "variant": variant, "of_seeds": of_seeds, "by_seed": [accuracy] * SEEDS}
    return {**base, "accuracy": [accuracy, accuracy, accuracy], **more}


def test_a_law_of_the_data_is_told_with_its_exponent_and_another_is_refused() -> None:
    def rows(law: Any) -> list[dict[str, Any]]:
        return [
            _row(f"samples={n}", {"loss": [0.3 + v for v in values]}, loss=0.5, reducible_loss=0.2)
            for n, values in zip((10, 20, 40, 80, 160, 320, 640), _noisy([law(x) for x in X]), strict=True)
        ]

    told = scaling_law(rows(lambda x: x**-0.4))
    value, low, high = told["found"]["t: exponent of samples"]
    assert low < value < high
    assert value == pytest.approx(-0.4, abs=0.03)
    assert f"{value:.2f}" in told["lines"][0]
    doubted = scaling_law(rows(lambda x: 1.6 if x < 100 else 1e-3))
    assert doubted["found"]["t: exponent of samples"] is None
    assert doubted["lines"][0].startswith("t: no power law of samples over 7 points from 10 to 640")
    assert "plateau and cliff describes it better" in doubted["lines"][0]


def test_calibration_is_compared_seed_by_seed() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0, 0.001, SEEDS)
    rows = [
        _row("plain", {"calibration_error": list(base)}),
        _row("smooth", {"calibration_error": list(base + 0.05)}, difference=[0, 0, 0]),
        _row("same", {"calibration_error": list(base)}, difference=[0, 0, 0]),
    ]
    told = calibration(rows)
    assert [t["variant"] for t in told["rows"]] == ["smooth", "same"]
    # exact sign flips of twelve seeds, for two tests
    assert told["rows"][0]["p_holm"] == pytest.approx(2 * 2 / 2**SEEDS)
    assert told["found"]["t, smooth: calibration error, less the base's"][0] == pytest.approx(0.05)
    assert "worse calibrated" in told["lines"][0]
    assert "no evidence" in told["lines"][1]


def test_other_lengths_are_compared_with_the_trained_one() -> None:
    values = list(np.linspace(0.5, 0.6, SEEDS))
    told = lengths([_row("learned", {"lengths": {"16": [0.9] * SEEDS, "32": values}})])
    assert [t["length"] for t in told["rows"]] == [16, 32]
    assert told["rows"][0]["p"] == 1
    assert told["rows"][1]["difference"][0] == pytest.approx(0.55 - 0.9)
    assert "0.900 [0.900, 0.900] at T = 16 (no change is seen)" in told["lines"][0]
    assert "at T = 32 (less)" in told["lines"][0]


def test_entropy_tells_early_from_late_and_counts_dormant_heads() -> None:
    spread = list(np.linspace(0, 0.01, SEEDS))
    # start: both layers even; end: the first sharper, the last as it was
    through = [[[0.9, 0.9 + e], [0.3 + e, 0.8]] for e in spread]
    heads = [{"accuracy": [[0.4, 0.0], [0.001, 0.002]]}] * SEEDS
    told = entropy([_row("pre-LN", {"entropy": through, "heads": heads})])
    late = told["found"]["t, pre-LN: entropy, late less early layer"]
    assert late[0] == pytest.approx(0.8 - 0.305)
    assert told["found"]["t, pre-LN: entropy, early layer, end less start"][2] < -0.5
    assert told["found"]["t, pre-LN: share of dormant heads"] == [0.75, 0.75, 0.75]
    assert "the late layer is spread more" in told["lines"][0]
    assert told["lines"][1].startswith("t, pre-LN: 0.750 [0.750, 0.750] of the heads are dormant")


def test_entropy_that_is_not_finite_is_said() -> None:
    told = entropy([_row("none", {"entropy": [[[None, 0.1]]] * SEEDS, "heads": []})])
    assert told["lines"] == ["t, none: no seed has an entropy that is finite"]


def test_shapes_are_compared_at_equal_parameters_alone() -> None:
    rows = [
        _row("N=2 d=64", {}, 0.8, parameters=100), _row("N=8 d=32", {}, 0.9, parameters=101),
        _row("N=8 d=64", {}, 1.0, parameters=400),
    ]  # fmt: skip
    told = shapes(rows)
    assert [(t["variant"], t["against"]) for t in told["rows"]] == [("N=8 d=32", "N=2 d=64")]
    assert told["found"]["t, N=8 d=32 against N=2 d=64"][0] == pytest.approx(0.1)
    assert "at the same N d^2 (101 parameters in all against 100)" in told["lines"][0]
    assert told["curves"]["t"]["N=8"] == [[101, 0.9, 0.9, 0.9], [400, 1.0, 1.0, 1.0]]


def test_a_variant_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="a variant was 'wide'; its name must tell the shape, as N=2 d=64"):
        shapes([_row("wide", {}, parameters=1)])


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ([0.5, 0.1, 0.9], "confirmed"),
        ([0.5, -0.1, 0.9], "undecided"),
        ([2.0, 1.5, 3.0], "contradicted"),
        ([0.5, None, 0.9], "undecided"),
        (None, "undecided"),
    ],
)
def test_an_expectation_can_fail(found: list[float | None] | None, outcome: str) -> None:
    assert Expectation("x", 0.0, 1.0, "here").outcome(found) == outcome


def test_the_answer_says_what_became_of_what_was_expected() -> None:
    study = Study(
        name="s", question="q?", source="here", config={}, recipe=Recipe(), variants=(Variant("learned"),),
        tasks=("precede",), fit="lengths",
        expectations=(
            Expectation("t, learned: accuracy at T = 16", 0.0, 0.6, "a book", registered="2026-01-01"),
            Expectation("t, learned: accuracy at T = 99", -math.inf, -1e-9, "nobody"),
        ),
    )  # fmt: skip
    records = [{"lengths": {"16": 0.9}} for _ in range(SEEDS)]
    row = {**_row("learned", {}), **beside(records, study.fit)}
    told = answer(study, [row])
    assert [e["outcome"] for e in told["expectations"]] == ["contradicted", "undecided"]
    assert told["expectations"][0]["registered"] == "2026-01-01"
    assert "predicted: t, learned: accuracy at T = 16 0 to 0.6 (a book): contradicted" in told["lines"]
    assert "predicted: t, learned: accuracy at T = 99 below 0 (nobody): undecided" in told["lines"]
    assert beside(records, "") == {}
