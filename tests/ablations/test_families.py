"""One family of tests for one claim: whole studies, parts of them, studies that share comparisons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from veriformer.ablations.execution.plan import Grouping
from veriformer.ablations.studies import STUDIES
from veriformer.ablations.studies.study import Study
from veriformer.ablations.verdicts.summary import summarise

SEEDS, GROUPING = 12, Grouping()

CURVES = {
    "step": [1], "loss": [0.1], "observed_at": [0], "held_out_accuracy": [1.0], "gradient_norm": {}, "entropy": [],
}  # fmt: skip


def stored(studies: list[Study]) -> dict[str, dict[str, Any]]:
    """Return trials as a store would hold them: without residual connections nine of twelve seeds die, at N = 6."""
    found: dict[str, dict[str, Any]] = {}
    for study in studies:
        for task, setting, variant in study.rows():
            for job in GROUPING.jobs(study, task, setting, variant, SEEDS):
                for index, (key, trial) in enumerate(zip(job.keys, job.trials, strict=True)):
                    dies = index < 9 and trial.config.get("residual") is False and trial.config["num_layers"] == 6
                    found[key] = {
                        "accuracy": 0.5 if dies else 1.0, "loss": 0.1, "loss_area": 0.2 + 0.01 * index, "max_loss": 1.0,
                        "spikes": 0, "diverged": None, "steps_to_95": 10, "calibration_error": 0.0, "seconds": 1.0,
                        "stack": 12, "lengths": {}, "checks": {}, "curves": CURVES,
                    }  # fmt: skip
    return found


def rows(told: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(study["name"], row["setting"]): row for study in told for row in study["rows"] if "p" in row}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return stored([STUDIES["residual"], STUDIES["residual-norm"]])


def test_the_same_trials_have_one_verdict_in_two_studies(found: dict[str, dict[str, Any]]) -> None:
    told = rows(summarise([STUDIES["residual-norm"], STUDIES["residual"]], SEEDS, GROUPING, found))
    here, there = told["residual-norm", "norm=pre lr=0.002"], told["residual", "N=6 lr=0.002"]
    assert here["p"] == there["p"] == 2 / 2**9
    assert here["family"] == there["family"] == {"name": "residual", "tests": 21}
    assert (here["p_holm"], here["verdict"]) == (there["p_holm"], there["verdict"])


def test_a_part_of_a_study_is_never_more_certain_than_the_whole(found: dict[str, dict[str, Any]]) -> None:
    study = STUDIES["residual"]
    part = study.cut(tasks=("precede",))
    assert part is not None
    (whole,), (filtered,) = (summarise([s], SEEDS, GROUPING, found) for s in (study, part))
    assert whole["tests"] == filtered["tests"] == 21
    assert (whole["untested"], filtered["untested"]) == (0, 3)
    others = [r["p_holm"] for r in whole["rows"] if "p" in r and r["task"] == "precede"]
    ours = [r["p_holm"] for r in filtered["rows"] if "p" in r]
    assert len(ours) == len(others) == 6
    assert all(part >= full for part, full in zip(ours, others, strict=True))
    assert min(ours) < 1


def test_a_study_of_ones_own_is_a_family_of_its_own(found: dict[str, dict[str, Any]]) -> None:
    """Under another name the comparisons of a registered study stay that one's."""
    own = replace(STUDIES["residual"], name="mine", config={**STUDIES["residual"].config, "d_ff": 16})
    told = rows(summarise([own], SEEDS, GROUPING, stored([own])))
    assert told["mine", "N=6 lr=0.002"]["family"] == {"name": "mine", "tests": 21}
    copied = rows(summarise([replace(STUDIES["residual"], name="copied")], SEEDS, GROUPING, found))
    assert copied["copied", "N=6 lr=0.002"]["family"] == {"name": "residual", "tests": 21}
