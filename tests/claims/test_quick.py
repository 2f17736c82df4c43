"""What `--quick` trains, and repetitions on seeds of one's own choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from made_up_evidence import MadeUp
from veriformer.ablations.execution.plan import Job
from veriformer.ablations.execution.work import train_job
from veriformer.ablations.studies.study import Study, Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import ledger
from veriformer.claims.entries.bases import SMALL, study
from veriformer.claims.trained import Name, Row, planned
from veriformer.cli.main import main

TRAINED = [n for n, c in ledger().items() if c.trains]

LAYER_STEPS = 23_000
"""Steps times layers of all stacks of a quick run. One took some ten milliseconds of a core where this was set: three
minutes on two cores are well over it, and what the other claims take too."""

TINY = study(
    "tiny",
    {**SMALL, "num_layers": 1},
    Recipe(steps=3, batch_size=4, learning_rate=3e-3),
    (
        Variant("base"),
        Variant("slow", recipe={"learning_rate": 1e-4, "warm_up": 2}),
        Variant("drawn", config={"init": "gpt2"}),
        Variant("other", config={"norm": "none"}),
    ),
    ("precede",),
)


@dataclass
class Planned(MadeUp):
    """Evidence that writes down what would be trained."""

    jobs: list[Job] = field(default_factory=list)

    def trained(self, study: Study, seeds: range | None = None) -> dict[Name, Row]:
        self.jobs += planned(study, self.seeds() if seeds is None else seeds, together=self.quick)[0]
        return super().trained(study, seeds)


def test_a_quick_run_trains_little() -> None:
    jobs: dict[tuple[str, ...], Job] = {}
    for number in TRAINED:
        see = Planned(quick=True)
        ledger()[number].gather(see)
        jobs |= {job.keys: job for job in see.jobs}
    first = [job.trials[0] for job in jobs.values()]
    assert 5_000 < sum(t.recipe.steps * t.config["num_layers"] for t in first) <= LAYER_STEPS


def test_rows_of_a_full_run_are_stacked_by_themselves() -> None:
    jobs, rows = planned(TINY, range(14))
    assert [len(job.trials) for job in jobs] == [12, 2] * 4
    for name, keys in rows.items():
        own = [Job(tuple(_trial(name, s) for s in part)) for part in (range(12), range(12, 14))]
        assert keys == [key for job in own for key in job.keys]


def _trial(name: Name, seed: int):  # type: ignore[no-untyped-def]
    task, setting, variant = next(row for row in TINY.rows() if row[2].name == name[2])
    return TINY.trial(task, setting, variant, seed)


def test_a_quick_run_stacks_rows_that_differ_in_rate_warm_up_and_first_weights_alone() -> None:
    jobs, rows = planned(TINY, range(5), together=True)
    assert [len(job.trials) for job in jobs] == [15, 5]
    assert {name[2]: len(set(keys)) for name, keys in rows.items()} == dict.fromkeys(
        ("base", "slow", "drawn", "other"), 5
    )
    wide, _ = planned(TINY, range(8), together=True)
    assert [len(job.trials) for job in wide] == [20, 4, 8]


@pytest.mark.parametrize("change", [{"label_smoothing": 0.1}, {"clip": 1.0}, {"steps": 4}, {"autocast": True}])
def test_what_a_stack_shares_keeps_rows_apart(change: Mapping[str, object]) -> None:
    variants = (Variant("base"), Variant("changed", recipe=change))
    jobs, _ = planned(replace(TINY, variants=variants), range(3), together=True)
    assert [len(job.trials) for job in jobs] == [3, 3]


def test_a_row_is_trained_in_a_stack_as_it_is_alone() -> None:
    losses = []
    for together in (False, True):
        jobs, rows = planned(TINY, range(2), together=together)
        records = {k: r for job in jobs for k, r in zip(job.keys, train_job(job.trials)["records"], strict=True)}
        losses.append({name[2]: [records[k]["loss"] for k in keys] for name, keys in rows.items()})
    alone, stacked = losses
    assert len({round(row[0], 3) for row in alone.values()}) > 1
    for name, row in alone.items():
        # three steps of at most 3e-3 a parameter: what float32 rounds off can turn no more than Adam's sign of a
        # gradient near zero, and losses of order one then agree to a thousandth
        assert stacked[name] == pytest.approx(row, abs=1e-3), name


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["claims", *words])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out + err


@pytest.mark.usefixtures("no_properties")
def test_a_claim_is_repeated_on_other_seeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def row(*words: str):  # type: ignore[no-untyped-def]
        out = run(capsys, "20", "--quick", "--out", str(tmp_path), "--format", "json", *words)[1]
        return json.loads(out)["claims"][0]

    usual, other = row(), row("--first-seed", "9000")
    assert (usual["seeds"], other["seeds"]) == ([7000, 7011], [9000, 9011])
    assert other["command"] == "veriformer claims 20 --quick --first-seed 9000"
    assert usual["command"] == "veriformer claims 20 --quick"
    drawn = [[f["low"] for f in found["findings"] if "gradient" in f["says"]] for found in (usual, other)]
    assert drawn[0] != drawn[1], "other seeds give other numbers"
    assert "repetition on seeds from 9000 on" in (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "claims.json").read_text())["first_seed"] == 9000
    assert row()["seeds"] == [7000, 7011], "rows of other seeds are no answer"


def test_a_seed_that_something_was_tuned_on_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, told = run(capsys, "20", "--first-seed", "1999", "--out", str(tmp_path))
    assert status == 3
    assert "1999" in told
    assert "2000" in told
