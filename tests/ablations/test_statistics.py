"""Statistics against hand-computed cases, and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from veriformer.ablations.statistics.paired import (
    Comparison,
    fisher_p,
    holm,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
    sign_flip_p,
    smallest_detectable,
    smallest_p,
    wilson,
)


def brute_force(differences: list[float]) -> float:
    flips = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in
             itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    return sum(f >= abs(sum(differences)) - 1e-12 for f in flips) / len(flips)


@pytest.mark.parametrize("seed", range(8))
def test_sign_flip_goes_through_all_flips(seed: int) -> None:
    differences = np.random.default_rng(seed).normal(0.5, 1, 3 + seed).round(2).tolist()
    assert sign_flip_p(differences) == pytest.approx(brute_force(differences))


@pytest.mark.parametrize("n", [2, 5, 10, 12, 16])
def test_the_smallest_p_is_reached_when_all_agree(n: int) -> None:
    assert sign_flip_p([0.1] * n) == pytest.approx(smallest_p(n)) == pytest.approx(2 / 2**n)


def test_more_seeds_than_can_be_gone_through() -> None:
    assert sign_flip_p([0.1] * 20) == pytest.approx(smallest_p(20))
    assert sign_flip_p([0.1, -0.1] * 10) == 1.0


def test_no_difference_is_no_evidence() -> None:
    assert sign_flip_p([0.0] * 12) == 1.0


def test_ties_are_not_dropped() -> None:
    # Wilcoxon would throw the ten zeros away and see 2 of 2; here they weaken nothing and strengthen nothing
    assert sign_flip_p([0.0] * 10 + [1.0, 1.0]) == pytest.approx(0.5)


def test_holm_by_hand() -> None:
    assert holm([0.001, 0.01, 0.02, 0.5]) == pytest.approx([0.004, 0.03, 0.04, 0.5])
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # monotone, in the given order
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_interval_of_a_constant_sample_is_the_point() -> None:
    interval = mean_interval([1.0] * 12)
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_one_seed_tells_nothing_of_the_spread() -> None:
    interval = mean_interval([0.7])
    assert interval.low == -math.inf
    assert interval.high == math.inf


def test_interval_agrees_with_students_where_that_is_right() -> None:
    sample = np.random.default_rng(0).normal(size=200)
    ours, theirs = mean_interval(sample), stats.ttest_1samp(sample, 0).confidence_interval()
    assert ours.low == pytest.approx(theirs.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.high, abs=0.02)


@pytest.mark.parametrize("values", [[0.5] * 11 + [1.0], [1.0] * 11 + [0.5], [0.5, 1.0] * 6])
def test_bimodal_samples_have_finite_intervals(values: list[float]) -> None:
    interval = mean_interval(values)
    assert interval.low <= interval.value <= interval.high
    assert interval.low >= 0.5
    assert interval.high <= 1.0


def test_small_pieces_by_hand() -> None:
    assert interquartile_mean([0, 1, 2, 3, 4, 5, 6, 100]) == pytest.approx(3.5)
    assert probability_of_improvement([1, 1], [0, 1]) == 0.75
    assert fisher_p((0, 12), (12, 12)) == pytest.approx(2 / math.comb(24, 12))
    share = wilson(0, 12)
    assert share.low == pytest.approx(0, abs=1e-9)
    # z^2 / (n + z^2), Wilson's upper end for no success
    assert share.high == pytest.approx(1.96**2 / (12 + 1.96**2), abs=1e-3)


def test_smallest_detectable_has_the_power_that_it_says() -> None:
    rng, n = np.random.default_rng(0), 12
    sample = rng.normal(size=n)
    effect = smallest_detectable(sample)
    spread = sample.std(ddof=1)
    found = stats.ttest_1samp(rng.normal(effect, spread, size=(4000, n)), 0, axis=1).pvalue < 0.05
    # four standard errors of a share of 4000
    assert found.mean() == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / 4000))


def test_smallest_detectable_grows_with_the_family_and_stops_at_the_resolution() -> None:
    sample = [0.1, -0.1, 0.2, 0.0, 0.1, 0.3]
    assert smallest_detectable(sample, tests=20) > smallest_detectable(sample)
    assert smallest_detectable([0.0] * 6, resolution=0.01) > 0
    assert smallest_detectable([0.1]) == math.inf


@pytest.mark.parametrize("law", ["normal", "bimodal", "skewed"])
def test_false_verdicts_stay_at_the_nominal_rate(law: str) -> None:
    """Under no effect base and variant are exchangeable; a family of 8 tests is wrong in at most 5 % of runs.

    9 seeds are the fewest whose smallest p, 2 / 2^9, survives the correction. Without it a family would be wrong in
    1 - (1 - 24/512)^8 = 32 % of runs, and 60 runs would show that in all but 0.2 % of all attempts.
    """
    rng, runs, wrong = np.random.default_rng(7), 60, 0
    for _ in range(runs):
        base, variant = (_draw(law, rng, (8, 9)) for _ in range(2))
        adjusted = holm([sign_flip_p(v - b) for b, v in zip(base, variant, strict=True)])
        wrong += min(adjusted) < 0.05
    # 99.9 % of binomial(60, 0.05) lies at or below this
    assert wrong <= stats.binom.ppf(0.999, runs, 0.05)


def _draw(law: str, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    if law == "normal":
        return rng.normal(size=size)
    if law == "bimodal":
        return np.where(rng.random(size) < 0.6, 0.5, 1.0) + rng.normal(0, 0.005, size)
    return rng.exponential(size=size)


def test_coverage_of_the_interval() -> None:
    """With 12 seeds a BCa interval of a normal mean covers somewhat less than it says (measured: about 92 %)."""
    rng, runs = np.random.default_rng(3), 300
    hits = 0
    for _ in range(runs):
        interval = mean_interval(rng.normal(size=12))
        hits += interval.low <= 0 <= interval.high
    assert hits / runs >= 0.92 - 4 * math.sqrt(0.92 * 0.08 / runs)


def test_unequal_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="base has 2 seeds and variant 3"):
        Comparison.of([1, 2], [1, 2, 3])


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        mean_interval([1.0, math.nan])
