"""The tolerances: derived bounds really bound, and the measured one follows the subject's own rounding."""

from __future__ import annotations

import math

import pytest
import torch

from broken_models import RIGHT, layer
from veriformer.properties.bench.measured import judged_dtypes, tolerance_of
from veriformer.properties.bench.noise import relative_tolerance
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.differences import worst_difference
from veriformer.properties.definitions.rounding import GAP, epsilon, rounding_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 10, 1000])
def test_rounding_bound_covers_a_sequential_sum(dtype: torch.dtype, length: int) -> None:
    terms = torch.rand(200, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    total = torch.zeros(200, dtype=dtype)
    for i in range(length):
        total = total + terms[:, i]
    exact = terms.double().sum(dim=1)
    error = ((total.double() - exact).abs() / exact).max()
    assert error <= rounding_bound(dtype, length)


def test_rounding_bound_is_not_generous() -> None:
    assert rounding_bound(torch.float32, 64) < 1e-5
    assert rounding_bound(torch.float64, 64) < 1e-13


def test_worst_difference_never_lets_nan_pass() -> None:
    nan, inf = float("nan"), float("inf")
    assert worst_difference(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])).error == math.inf
    assert worst_difference(torch.tensor([inf]), torch.tensor([inf])).error == 0
    assert worst_difference(torch.tensor([inf]), torch.tensor([-inf])).error == math.inf
    worst = worst_difference(torch.tensor([[0.0, 1.0], [5.0, 2.0]]), torch.tensor([[0.0, 1.0], [3.0, 2.0]]))
    assert (worst.error, worst.index, worst.got, worst.expected) == (2.0, (1, 0), 5.0, 3.0)


def test_a_chaotic_subject_cannot_buy_leniency() -> None:
    assert relative_tolerance(1.0, torch.float32, 64) == GAP[torch.float32]
    assert relative_tolerance(0.0, torch.float32, 64) == 16 * epsilon(torch.float32)


def test_float64_is_used_only_where_it_is_genuine() -> None:
    genuine = Workbench(RIGHT, Settings())
    rounded = Workbench(layer(lambda x: (x.float() * 1.5).to(x.dtype)), Settings())
    assert judged_dtypes(genuine) == (torch.float32, torch.float64)
    assert judged_dtypes(rounded) == (torch.float32,)


def test_measured_tolerance_lies_between_rounding_and_real_deviations() -> None:
    bench = Workbench(RIGHT, Settings())
    tolerance = tolerance_of(bench, bench.pool.get(bench.configs[0], torch.float32))
    assert 16 * epsilon(torch.float32) <= tolerance <= 5.5e-5


def test_a_narrow_constant_does_not_cost_float64() -> None:
    masked = Workbench(layer(lambda x: x * torch.ones(x.shape[1]).to(x.dtype)[:, None] * 1.5), Settings())
    assert judged_dtypes(masked) == (torch.float32, torch.float64)
    upcast = Workbench(layer(lambda x: x + x.softmax(-1, dtype=torch.float32).to(x.dtype)), Settings())
    assert judged_dtypes(upcast) == (torch.float32,)
