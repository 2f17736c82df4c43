"""Which operation costs the precision, told by doing it in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.subject.subject import Subject


class Layer(nn.Module):
    """A layer that normalises large numbers: their mean square in float32, or in the dtype of its input."""

    def __init__(self, width: int, slip: str) -> None:
        super().__init__()
        self.map, self.slip = nn.Linear(width, width), slip

    def forward(self, x: Tensor) -> Tensor:
        y = 400 * self.map(x)
        wide = y if self.slip == "statistic" else y.to(torch.promote_types(y.dtype, torch.float32))
        return x + (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


@pytest.mark.parametrize(
    ("slip", "said"), [("statistic", "a statistic (mean, square, root) is computed in float16"), ("", "PASS")]
)
def test_the_operation_that_costs_the_precision_is_named(slip: str, said: str) -> None:
    subject = Subject(
        kind="layer",
        build=lambda c: Layer(c.d_model, slip),
        forward=lambda m, x: m(x),
        declares={"half_precision": True},
    )
    judge = Judge(subject, Settings(profile="quick", named=("numerics.precision-ladder",)))
    results = [judge.judge(prop) for prop in named(("numerics.precision-ladder",))]
    found = results[-1].counterexample
    assert said in (found.cause if found else results[-1].outcome)
