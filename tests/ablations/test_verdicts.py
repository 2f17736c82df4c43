"""Verdicts and predictions, from records made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from veriformer.ablations.statistics.paired import ALPHA
from veriformer.ablations.studies import STUDIES
from veriformer.ablations.studies.study import Prediction
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.verdicts.families import Families, claim_of, number_of_tests
from veriformer.ablations.verdicts.predictions import outcome
from veriformer.ablations.verdicts.rows import Row, compare, describe, pace, verdict


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


def test_clean_seeds_are_alike_if_alive_and_say_what_they_do_not_exclude() -> None:
    for number, share in ((12, 0.221), (24, 0.117)):
        clean = row([1.0] * number, [0.999] * (number // 2) + [1.0] * (number // 2))
        assert verdict(clean) == "alike if alive"
        assert describe(clean)["dead"]["not_excluded"] == pytest.approx(share, abs=5e-4)


def test_equivalent_takes_as_many_seeds_as_exclude_a_fall_of_the_mean() -> None:
    # a share of .0196 dead seeds is a fall of one point of .51; 0.025^(1 / n) is 1 - .0196 at n = 186
    assert verdict(row([1.0] * 170, [1.0] * 170)) == "alike if alive"
    assert verdict(row([1.0] * 205, [1.0] * 205)) == "equivalent"


def test_one_dead_seed_is_not_equivalent() -> None:
    assert verdict(row([1.0] * 24, [1.0] * 23 + [0.5])) == "no evidence"
    assert verdict(row([1.0] * 23 + [0.5], [1.0] * 23 + [0.5])) == "no evidence"


def test_a_certain_difference_below_one_point_is_no_harm() -> None:
    assert verdict(row(ONES, [0.998] * 12)) == "alike if alive"
    assert verdict(row(ONES, [0.98] * 12)) == "hurts"


def test_two_dead_of_twelve_are_no_evidence() -> None:
    assert verdict(row(ONES, [0.5] * 2 + [1.0] * 10)) == "no evidence"


def test_a_family_asks_for_more() -> None:
    nine = [0.5] * 9 + [1.0] * 3  # p = 2 / 2^9 = 0.0039, of accuracy and of who is dead
    assert verdict(row(ONES, nine)) == "hurts"
    assert verdict(row(ONES, nine, tests=9)) == "no evidence"


def test_more_dead_seeds_hurt_though_the_living_do_better() -> None:
    """The mean stays where it is: 12 of 24 die, the others rise from .75 to 1. Who is dead tells it."""
    found = row([0.75] * 24, [0.5] * 12 + [1.0] * 12)
    assert found.accuracy is not None
    assert found.accuracy.p == 1.0
    assert found.dead_p == pytest.approx(2 / 2**12)
    assert verdict(found) == "hurts"


def test_part_of_a_family_is_corrected_for_all_of_it() -> None:
    nine = [0.5] * 9 + [1.0] * 3
    alone = row(ONES, nine)
    alone.family = "f"
    compare([alone], {"f": 60})
    assert alone.accuracy_holm == pytest.approx(60 * 2 / 2**9)
    assert alone.tests == 60
    assert verdict(alone) == "no evidence"


def test_rows_of_one_claim_are_one_test_with_one_answer() -> None:
    nine = [0.5] * 9 + [1.0] * 3
    twins = [row(ONES, nine), row(ONES, nine), row(ONES, ONES)]
    for twin, claim in zip(twins, "aab", strict=True):
        twin.claim, twin.family = claim, "f"
    compare(twins)
    assert {t.tests for t in twins} == {6}
    assert twins[0].accuracy_holm == twins[1].accuracy_holm


def test_a_comparison_of_several_studies_has_one_family() -> None:
    """The same trials were no evidence in one study and hurt in another while each corrected for itself."""
    families = Families.of([])
    for name in ("residual", "residual-norm"):
        study = STUDIES[name]
        (place,) = (
            (task, setting, variant)
            for task, setting, variant in study.rows()
            if (task, setting.name) in (("precede", "N=6 lr=0.002"), ("precede", "norm=pre lr=0.002"))
            and variant.name == "no residual"
        )
        assert families.owner[claim_of(study, *place)] == "residual"
    assert sum(families.sizes.values()) == 3 * len(families.owner)


def test_a_filtered_study_keeps_its_family() -> None:
    whole = STUDIES["positions"]
    part = whole.cut(tasks=("first",), variants=("rotary",))
    assert part is not None
    assert [(t, v.name) for t, _, v in part.rows()] == [("first", "learned"), ("first", "rotary")]
    assert number_of_tests(part) == number_of_tests(whole) == 60
    assert Families.of([part]).sizes["positions"] == Families.of([whole]).sizes["positions"] == 60
    assert part.cut(variants=("rotary",)).whole is whole  # type: ignore[union-attr]
    assert whole.cut(tasks=("copy",)) is None
    assert whole.cut() is whole


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
    assert verdict(slow) == "alike if alive"
    assert slow.at_ceiling
    assert pace(slow) == "slower"


def test_a_loss_that_was_not_finite_counts_as_a_large_one() -> None:
    lost = Row(
        TASKS["precede"], "", "v", [record(0.5, None) for _ in range(12)], [record(1.0) for _ in range(12)], False
    )
    compare([lost])
    assert pace(lost) == "slower"


@pytest.mark.parametrize(
    ("expects", "variant", "found"),
    [
        ("hurts", HALVES, "confirmed"),
        ("helps", HALVES, "contradicted"),
        ("equivalent", HALVES, "contradicted"),
        ("equivalent", ONES, "ceiling"),
        ("equivalent", [0.994] * 12, "undecided"),
        ("alike", [0.994] * 12, "confirmed"),
        ("alike", ONES, "ceiling"),
        ("alike", HALVES, "contradicted"),
        ("alike", [0.5] * 2 + [1.0] * 10, "undecided"),
        ("hurts", ONES, "contradicted"),
        ("hurts", [0.5] * 2 + [1.0] * 10, "undecided"),
        ("chance", HALVES, "confirmed"),
        ("chance", ONES, "contradicted"),
        ("slower", ONES, "undecided"),
    ],
)
def test_predictions(expects: str, variant: list[float], found: str) -> None:
    assert outcome(Prediction("v", expects, ""), row(ONES, variant)) == found


def test_a_theorem_confirms_no_prediction() -> None:
    told = Prediction("v", "chance", "", theorem="permutation")
    assert outcome(told, row(ONES, HALVES, forced=True, holds=True)) == "theorem"
    assert outcome(told, row(ONES, HALVES, forced=True, holds=False)) == "contradicted"
    assert outcome(told, row(ONES, ONES, forced=True, holds=True)) == "contradicted"


def test_dead_seeds_are_told_beside_the_mean() -> None:
    told = describe(row(ONES, [0.5] * 6 + [1.0] * 6))
    assert told["dead"]["count"] == 6
    assert told["dead"]["share"] == pytest.approx([0.5, 0.211, 0.789], abs=5e-4)  # tables of Clopper and Pearson
    assert told["dead_p"] == pytest.approx(2 / 2**6)  # six pairs of which one is dead, all on one side
    assert told["accuracy"][0] == 0.75
    assert told["probability_of_improvement"] == 0.75
    assert told["difference"][0] == -0.25
    assert told["alive"] == {"pairs": 6, "difference": [0.0, 0.0, 0.0]}


def test_every_raw_p_is_told() -> None:
    told = describe(row(ONES, [0.5] * 9 + [1.0] * 3, tests=2))
    assert told["p"] == told["dead_p"] == 2 / 2**9
    assert told["area_p"] == 1.0
    assert told["family"] == {"name": "", "tests": 6}
    assert told["p_holm"] == pytest.approx(6 * told["p"])
    assert told["dead_p_holm"] == pytest.approx(6 * told["p"])  # never smaller than that of one before it


def test_no_evidence_says_what_the_tests_would_have_seen() -> None:
    told = describe(row(ONES, [0.5] * 2 + [1.0] * 10, tests=4))
    assert told["verdict"] == "no evidence"
    seen = told["detectable"]
    # 12 tests at .05: 2 / 2^k <= .0042 takes 9 of 12 dead; at a share of .8 to .86 that has a power of 0.8
    assert 0.78 <= seen["dead_share"] <= 0.88
    assert told["smallest_detectable"] == seen["fall"] == pytest.approx(seen["dead_share"] * 0.5)


@pytest.mark.parametrize("seeds", [12, 24])
def test_at_five_percent_dead_no_claim_of_equality_is_false(seeds: int) -> None:
    """The mean falls by 2.5 points, so *equivalent* is false, and often no seed of the sample has died.

    *alike if alive* must exclude no share that is true; 300 runs, at most 5 % of either may be wrong.
    """
    rng, runs, equal, excluded, said = np.random.default_rng(seeds), 300, 0, 0, 0
    for _ in range(runs):
        base, variant = (rng.beta(900, 1, seeds) for _ in range(2))
        found = row(base.tolist(), np.where(rng.random(seeds) < 0.05, 0.5, variant).tolist())
        equal += verdict(found) == "equivalent"
        if verdict(found) == "alike if alive":
            said += 1
            excluded += describe(found)["dead"]["not_excluded"] < 0.05
    assert equal == 0
    assert excluded == 0
    # the claim is made as often as no seed dies
    assert said / runs == pytest.approx(0.95**seeds, abs=4 * 0.5 / math.sqrt(runs))


def test_two_variants_that_die_alike_are_rarely_told_apart() -> None:
    """200 families of four rows without any effect, 20 % dead in base and variant: at most 5 % with a false verdict."""
    rng, runs, wrong = np.random.default_rng(1), 200, 0
    for _ in range(runs):
        rows = []
        for _ in range(4):
            base, variant = (np.where(rng.random(12) < 0.2, 0.5, rng.beta(50, 1, 12)).tolist() for _ in range(2))
            rows.append(Row(TASKS["precede"], "", "v", [record(a) for a in variant], [record(a) for a in base], False))
        compare(rows)
        wrong += any(verdict(r) in ("hurts", "helps") for r in rows)
    # 99.9 % of binomial(200, 0.05) lies at or below this
    assert wrong <= stats.binom.ppf(0.999, runs, ALPHA)


def test_an_unknown_expectation_is_refused() -> None:
    with pytest.raises(ValueError, match="'better'; it must be one of hurts, helps"):
        Prediction("v", "better", "")


def test_a_registration_is_a_date() -> None:
    with pytest.raises(ValueError, match="registered 'today'; a date like 2026-11-22 is required"):
        Prediction("v", "hurts", "", registered="today")
