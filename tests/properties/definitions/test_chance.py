"""Quantiles of chance are those of scipy.stats, which takes long to import."""

from __future__ import annotations

import pytest
from scipy import stats

from veriformer.properties.definitions.chance import binomial_interval, least_hits, most_hits, squares_interval

SHARES = (1e-4, 0.1, 0.15, 0.5, 0.8, 0.999, 1.0)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000, 40_000])
@pytest.mark.parametrize("tail", [5e-13, 5e-10, 1e-3, 0.025])
def test_hits_are_those_of_scipy(count: int, tail: float) -> None:
    for share in SHARES:
        assert least_hits(tail, count, share) == stats.binom.ppf(tail, count, share), share
        assert most_hits(tail, count, share) == stats.binom.isf(tail, count, share), share


@pytest.mark.parametrize(("count", "share"), [(0, 0.5), (100, 0.0)])
def test_nothing_hits_without_draws_or_with_none_that_can(count: int, share: float) -> None:
    assert binomial_interval(1e-9, count, share) == (0, 0)


@pytest.mark.parametrize("count", [1, 16, 1024, 100_000])
def test_sums_of_squares_are_those_of_scipy(count: int) -> None:
    low, high = squares_interval(0.5e-12, count)
    assert low == pytest.approx(stats.chi2.ppf(0.5e-12, count), rel=1e-9)
    assert high == pytest.approx(stats.chi2.isf(0.5e-12, count), rel=1e-9)
