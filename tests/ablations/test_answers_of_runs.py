"""Every kind of answer comes out of a run: trials that are trained here, their record, its sentences and figures."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from veriformer.ablations.execution.plan import Grouping
from veriformer.ablations.execution.store import Store
from veriformer.ablations.running import Run
from veriformer.ablations.statistics.answers import ANSWERS
from veriformer.ablations.studies.study import Expectation, Study, Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.reports.ablation import figures, markdown

CONFIG = {"num_layers": 1, "d_model": 8, "num_heads": 2, "positions": "learned"}
RECIPE = Recipe(steps=2, batch_size=4)
KINDS: dict[str, dict[str, Any]] = {
    "calibration": {"variants": (Variant("plain"), Variant("smooth", recipe={"label_smoothing": 0.5}))},
    "lengths": {"variants": (Variant("learned"),), "lengths": (12,)},
    "entropy": {"variants": (Variant("two"),), "config": {**CONFIG, "num_layers": 2}, "heads": True},
    "shapes": {
        "variants": (
            Variant("N=2 d=8", config={"num_layers": 2}), Variant("N=8 d=4", config={"num_layers": 8, "d_model": 4}),
        ),
    },
}  # fmt: skip
SENTENCES = {
    "calibration": "first, smooth: calibration error",
    "lengths": "at T = 12",
    "entropy": "of the heads are dormant",
    "shapes": "N=2 d=8 at the same N d^2",
}


class _Here:
    """An executor that works at once, in this process."""

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def test_every_answer_but_the_laws_is_here() -> None:
    assert {*KINDS, "scaling-law"} == set(ANSWERS)  # laws: see the small run of conftest


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("answers") / "trials.sqlite"
    studies = [
        Study(**{
            "name": kind, "question": "?", "source": "here", "config": CONFIG, "recipe": RECIPE, "tasks": ("first",),
            "fit": kind, "expectations": (Expectation("nothing", 0, 1, "nobody"),), **changes,
        })
        for kind, changes in KINDS.items()
    ]  # fmt: skip
    with Store(path) as store:
        run = Run(studies, [], 2, Grouping(), store)
        assert all(good for _, good in run.advance(_Here(), ahead=1))
        return run.record("veriformer ablate answers", {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_its_answer(record: dict[str, Any], kind: str) -> None:
    study = next(s for s in record["studies"] if s["name"] == kind)
    assert study["fit"]["kind"] == kind
    assert any(SENTENCES[kind] in line for line in study["fit"]["lines"])
    assert study["fit"]["expectations"][0]["outcome"] == "undecided"


def test_reports_tell_the_answers(record: dict[str, Any]) -> None:
    told = markdown(record)
    assert all(sentence in told for sentence in SENTENCES.values())
    assert "predicted: nothing 0 to 1 (nobody): undecided" in told
    assert "shapes-shapes" in figures(record)
