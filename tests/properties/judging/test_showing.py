"""Progress of `check`: on a terminal a bar and the plan, nothing anywhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import nn

from veriformer.properties import check
from veriformer.properties.engine.searching.planning import Plan
from veriformer.properties.judging.showing import progress
from veriformer.properties.results.records import Result
from veriformer.properties.subject.subject import Subject

PLAN = Plan("5.0 million parameters: 3 cases a property", "Made", 0.25, 150.0, 30.0)


def _shown(*, is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=200)
    subject = Subject(kind="norm", module=nn.LayerNorm(8))
    with progress(2, console) as (on_result, on_plan):
        on_plan(PLAN)
        on_result(subject, Result("norm.affine", "core", "PASS"))
    return out.getvalue()


def test_a_terminal_shows_the_plan_and_a_bar() -> None:
    shown = _shown(is_terminal=True)
    assert (
        "Made: 5.0 million parameters: 3 cases a property; one forward of a few tokens takes 0.25 s here, all of it "
        "about 2 min" in shown
    )
    assert "LayerNorm norm.affine" in shown
    assert "1/2" in shown


def test_what_is_no_terminal_stays_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert _shown(is_terminal=False) == ""
    assert check(nn.LayerNorm(8), kind="norm", only=["norm"], profile="quick").results
    assert capfd.readouterr() == ("", "")
