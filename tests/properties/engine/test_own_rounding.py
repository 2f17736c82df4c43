"""The rounding of one call's own inputs is asked for where a model amplifies it unevenly, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from veriformer.properties.bench.measured import tolerance_of
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.rounding import GAP
from veriformer.properties.engine.own_rounding import tolerance_at
from veriformer.tests.traps import all_traps


@pytest.mark.parametrize(("trap", "amplifies"), [("style-large-weights", True), ("style-eight-digits", False)])
def test_own_inputs_are_asked_where_rounding_is_amplified(trap: str, amplifies: bool) -> None:
    bench = Workbench(all_traps()[trap].subject(), Settings(profile="quick"))
    built = bench.pool.get(bench.configs[0], torch.float64)
    width = built.config.d_model
    drawn = torch.Generator().manual_seed(3)
    is_text = bench.subject.takes_tokens
    x = torch.randint(built.config.vocab_size, (1, 9), generator=drawn) if is_text else torch.randn(
        1, 9, width, generator=drawn, dtype=torch.float64
    )  # fmt: skip
    found = tolerance_at(bench, built, (x,), {})
    assert (found > 0) == amplifies
    assert found <= GAP[torch.float64]


def test_what_the_first_inputs_explain_needs_no_more_of_them() -> None:
    bench = Workbench(all_traps()["style-large-weights"].subject(), Settings(profile="quick"))
    built = bench.pool.get(bench.configs[0], torch.float64)
    least = tolerance_of(bench, built, error=0.0)
    assert ("floor", built.config, built.dtype) not in bench.measured
    assert least <= tolerance_of(bench, built) <= GAP[torch.float64]
