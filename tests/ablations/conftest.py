"""A small run, trained here, and its record."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from veriformer.ablations.execution.plan import Grouping
from veriformer.ablations.execution.store import Store
from veriformer.ablations.measuring import profiling
from veriformer.ablations.running import Run
from veriformer.ablations.studies import MEASUREMENTS
from veriformer.ablations.studies.study import Prediction, Setting, Study, Variant
from veriformer.ablations.trials.recipe import Recipe

Once = Callable[[str, Callable[[Path], None]], Path]

DATE = "2026-01-01"

SIZE = {"num_layers": 1, "d_model": 8, "num_heads": 2, "positions": "learned"}


class Here:
    """An executor that works at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as problem:
            future.set_exception(problem)
        return future


def studies() -> list[Study]:
    steps = Recipe(steps=6)
    return [
        Study(
            name="positions", question="order?", source="here", config=SIZE, recipe=steps,
            tasks=("first", "count"),
            variants=(Variant("learned"), Variant("none", "positions", {"positions": "none"})),
            predictions=(
                Prediction("none", "chance", "theorem", tasks=("first",), theorem="permutation", registered=DATE),
            ),
        ),
        Study(
            name="residual", question="depth?", source="here", config=SIZE, recipe=steps,
            tasks=("first",),
            variants=(Variant("residual"), Variant("no residual", "x", {"residual": False})),
            settings=tuple(
                Setting(f"N={n} lr={r:g}", {"num_layers": n}, {"learning_rate": r})
                for n in (1, 2)
                for r in (1e-3, 1e-2)
            ),
            predictions=(Prediction("no residual", "hurts", "a guess", registered=DATE),),
        ),
        Study(
            name="law", question="power?", source="here", config=SIZE, recipe=steps,
            tasks=("source",), fit="scaling-law",
            variants=(Variant("d=8"), *(Variant(f"d={d}", "w", {"d_model": d}) for d in (4, 16)),
                      *(Variant(f"samples={n}", "s", recipe={"steps": n}) for n in (2, 3, 4))),
            predictions=(Prediction("d=4", "hurts", "a guess", registered=DATE),),
        ),
    ]  # fmt: skip


@pytest.fixture(scope="session")
def record(once: Once) -> dict[str, Any]:
    """Return the record of the run, trained by the first worker that asks."""

    def train(folder: Path) -> None:
        with Store(folder / "trials.sqlite") as store, pytest.MonkeyPatch.context() as patch:
            patch.setitem(profiling.LENGTHS, "cpu", (8, 16, 32))
            run = Run(studies(), list(MEASUREMENTS.values()), 3, Grouping(), store)
            assert all(good for _, good in run.advance(Here(), ahead=1))
            measured = {m.name: list(m.points("cpu", 3)) for m in MEASUREMENTS.values()}
            assert {m.name: m.count("cpu") for m in MEASUREMENTS.values()} == {n: len(p) for n, p in measured.items()}
            record = run.record("veriformer ablate small", measured)
        (folder / "record").write_bytes(pickle.dumps(record))

    made: dict[str, Any] = pickle.loads((once("small run", train) / "record").read_bytes())
    return made
