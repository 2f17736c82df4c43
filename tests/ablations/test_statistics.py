"""Statistics against hand-computed cases, and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from veriformer.ablations.statistics.intervals import binomial_interval, mean_interval, share_not_excluded
from veriformer.ablations.statistics.paired import (
    Comparison,
    holm,
    interquartile_mean,
    probability_of_improvement,
    sign_flip_p,
    smallest_p,
)
from veriformer.ablations.statistics.power import POWER, smallest_detectable


def brute_force(differences: list[float]) -> float:
    flips = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in
             itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    return sum(f >= abs(sum(differences)) - 1e-12 for f in flips) / len(flips)


@pytest.mark.parametrize("seed", range(8))
def test_sign_flip_goes_through_all_flips(seed: int) -> None:
    differences = np.random.default_rng(seed).normal(0.5, 1, 3 + seed).round(2).tolist()
    assert sign_flip_p(differences) == pytest.approx(brute_force(differences))


@pytest.mark.parametrize("seed", range(4))
def test_sign_flip_is_that_of_scipy(seed: int) -> None:
    """16 pairs, all 65,536 flips; ties of sums included, since the differences are whole numbers."""
    differences = np.random.default_rng(seed).integers(-4, 6, 16).astype(float)
    theirs = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=2**16).pvalue
    assert sign_flip_p(differences / 1024) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (5, 0), (7, 1), (6, 6), (20, 3)])
def test_of_indicators_it_is_mcnemars_exact_test(worse: int, better: int) -> None:
    differences = [1.0] * worse + [-1.0] * better + [0.0] * 3
    wanted = stats.binomtest(worse, worse + better).pvalue if worse + better else 1.0
    assert sign_flip_p(differences) == pytest.approx(wanted)


@pytest.mark.parametrize("n", [2, 5, 10, 12, 16, 24, 32])
def test_the_smallest_p_is_reached_when_all_agree(n: int) -> None:
    assert sign_flip_p([0.1] * n) == pytest.approx(smallest_p(n)) == pytest.approx(2 / 2**n)


def test_more_seeds_than_can_be_gone_through() -> None:
    assert sign_flip_p([0.1] * 40) == pytest.approx(smallest_p(40)) == pytest.approx(2e-5)
    assert sign_flip_p([0.1, -0.1] * 20) == 1.0


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


def test_tests_that_were_not_made_only_raise_p() -> None:
    found = [0.001, 0.01, 0.02]
    assert holm(found, 10) == pytest.approx([0.01, 0.09, 0.16])
    rng = np.random.default_rng(0)
    for _ in range(50):
        others = rng.random(4) ** 3
        whole = holm([*found, *others])[:3]
        assert all(part >= full - 1e-12 for part, full in zip(holm(found, 7), whole, strict=True))
    with pytest.raises(ValueError, match="tests was 2, and there are 3 p-values"):
        holm(found, 2)


def test_without_bounds_a_constant_sample_is_the_point() -> None:
    interval = mean_interval([1.0] * 12)
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_one_seed_tells_nothing_of_the_spread() -> None:
    interval = mean_interval([0.7])
    assert interval.low == -math.inf
    assert interval.high == math.inf


def test_without_bounds_the_interval_is_students() -> None:
    sample = np.random.default_rng(0).exponential(size=9)
    ours, theirs = mean_interval(sample), stats.ttest_1samp(sample, 0).confidence_interval()
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("seeds", [12, 24])
@pytest.mark.parametrize("dead", [0, 1, 5])
def test_of_solved_or_dead_seeds_the_bounded_interval_is_the_exact_binomial_one(seeds: int, dead: int) -> None:
    bounded = mean_interval([0.0] * dead + [1.0] * (seeds - dead), (0.0, 1.0))
    exact = binomial_interval(seeds - dead, seeds)
    # a quantile of 9,999 draws: standard error sqrt(.025 * .975 / 9999) of the share below it, and the density of the
    # flattest of these laws is above 0.05 there, which makes 0.03 at four standard errors; seen are 0.005 and less
    assert (bounded.low, bounded.high) == pytest.approx((exact.low, exact.high), abs=0.015)


def test_a_bounded_interval_moves_and_grows_with_its_bounds() -> None:
    sample = [0.25, 0.5, 0.75, 0.5]
    one = mean_interval(sample, (0.0, 1.0))
    two = mean_interval([10 + 2 * x for x in sample], (10.0, 12.0))
    assert (two.low, two.high) == pytest.approx((10 + 2 * one.low, 10 + 2 * one.high))
    wide = mean_interval(sample, (-1.0, 2.0))
    assert wide.low < one.low < 0.5 < one.high < wide.high
    assert 0 < one.low < one.high < 1
    assert mean_interval(sample[::-1], (0.0, 1.0)) == one


def test_a_bounded_interval_of_many_seeds_is_drawn_in_parts() -> None:
    many = mean_interval([0.0, 1.0] * 1000, (0.0, 1.0))
    exact = binomial_interval(1000, 2000)
    assert (many.low, many.high) == pytest.approx((exact.low, exact.high), abs=0.002)


def test_a_value_outside_of_the_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values from 0\.5 to 1\.5 are not within the bounds 0 to 1"):
        mean_interval([0.5, 1.5], (0.0, 1.0))


def test_small_pieces_by_hand() -> None:
    assert interquartile_mean([0, 1, 2, 3, 4, 5, 6, 100]) == pytest.approx(3.5)
    assert probability_of_improvement([1, 1], [0, 1]) == 0.75
    share = binomial_interval(3, 12)
    # Clopper and Pearson: as many or more have probability 0.025 at the lower end, as many or fewer at the upper
    assert stats.binom.sf(2, 12, share.low) == pytest.approx(0.025)
    assert stats.binom.cdf(3, 12, share.high) == pytest.approx(0.025)
    assert stats.binom.cdf(3, 12, share_not_excluded(3, 12)) == pytest.approx(0.05)
    assert share_not_excluded(0, 24) == pytest.approx(1 - 0.05 ** (1 / 24))


LEVEL = 0.05 / 40


@pytest.mark.parametrize("seeds", [12, 24])
def test_power_of_deaths_alone_is_that_of_the_binomial_law(seeds: int) -> None:
    """Without any other difference k of n dead give p = 2 / 2^k, so what is needed is known exactly."""
    needed = next(k for k in range(seeds + 1) if 2 / 2**k <= LEVEL)
    shares = [i / 50 for i in range(51)]
    exact = next(q for q in shares if stats.binom.sf(needed - 1, seeds, q) >= POWER)
    found = smallest_detectable((0.0,) * seeds, 0.0, seeds, 0.5, LEVEL)
    # 200 runs know a power of 0.8 to 0.028; the power grows by more than that within two steps of 0.02
    assert found.dead_share == pytest.approx(exact, abs=0.041)
    assert found.fall == pytest.approx(found.dead_share * 0.5)
    assert found.shift == pytest.approx(0.5 / 1000)  # the smallest that is tried: every sign agrees


def test_what_is_called_detectable_is_found_by_the_test_itself() -> None:
    """Fresh random numbers, noise among the living, some dead in the base."""
    noise = tuple(np.random.default_rng(5).normal(0, 0.05, 12).tolist())
    found = smallest_detectable(noise, 0.1, 24, 0.5, LEVEL)
    assert found.dead_share is not None
    rng, runs, seen = np.random.default_rng(6), 150, 0
    for _ in range(runs):
        base, variant = rng.random(24) < 0.1, rng.random(24) < found.dead_share
        living = rng.choice(np.array(noise) - np.mean(noise), 24)
        values = np.where(base | variant, 0.5 * (base.astype(float) - variant), living)
        seen += sign_flip_p(values) <= LEVEL or sign_flip_p(variant.astype(float) - base) <= LEVEL
    # below 0.8 by four standard errors of both simulations at most, above by one step of the share and them
    assert 0.8 - 4 * 0.043 <= seen / runs <= 0.97


def test_power_says_none_where_nothing_could_be_seen() -> None:
    assert smallest_detectable((0.0,) * 6, 0.0, 6, 0.5, LEVEL).fall is None  # 2 / 2^6 is above the level
    assert smallest_detectable((0.0,) * 24, 0.0, 24, -0.1, LEVEL).fall is None  # a base at chance cannot fall
    few, many = (smallest_detectable((0.0,) * 24, 0.0, 24, 0.5, 0.05 / tests).fall for tests in (1, 100))
    assert few is not None
    assert many is not None
    assert few < many


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


@pytest.mark.parametrize("seeds", [12, 24])
@pytest.mark.parametrize("dead", [0.01, 0.05, 0.2, 0.5])
def test_coverage_of_the_interval_of_solved_or_dead_seeds(seeds: int, dead: float) -> None:
    """400 samples each; a law that covers 95 % covers fewer than 92.5 % of them once in 80 times, and seeds are fixed.

    Student's t covers half of the samples at 12 seeds and 5 % dead, where no seed of them died.
    """
    rng, runs = np.random.default_rng(3), 400
    dies = rng.random((runs, seeds)) < dead
    samples = np.where(dies, rng.normal(0.5, 0.015, (runs, seeds)), rng.beta(200, 1, (runs, seeds)))
    mean = dead * 0.5 + (1 - dead) * 200 / 201
    ends = [mean_interval(sample, (0.4, 1.0)) for sample in samples]
    assert sum(e.low <= mean <= e.high for e in ends) / runs >= 0.925


def test_unequal_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="base has 2 seeds and variant 3"):
        Comparison.of([1, 2], [1, 2, 3])


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        mean_interval([1.0, math.nan])
