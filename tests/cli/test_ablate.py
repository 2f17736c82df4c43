"""`veriformer ablate` from outside: what a user sees, what a kill costs, what bad input gets."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).parent / "veriformer")
SMALL = ["positions", "--task", "first", "--variant", "none", "--seeds", "3", "--stack", "1", "--jobs", "1"]
"""Six jobs of half a second."""


def ablate(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "ablate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return what the report says, without times."""
    record = json.loads((folder / "ablation.json").read_text())
    return [{k: v for k, v in row.items() if k != "seconds"} for study in record["studies"] for row in study["rows"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablations")
    done = ablate(*SMALL, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_killed_at_random_moments_it_ends_with_the_same_table(undisturbed: Path, tmp_path: Path) -> None:
    chance = random.Random(5)
    kills, stored = 0, 0
    command = [COMMAND, "ablate", *SMALL, "--out", str(tmp_path)]
    store = tmp_path / "trials.sqlite"
    for _ in range(5):
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # a moment between the first write and the end: after the store has grown, or at once
        wanted = stored + chance.choice([0, 0, 1, 1, 2])
        while running.poll() is None and _stored(store) < wanted:
            time.sleep(0.02)
        time.sleep(chance.random() * 0.3)
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
            kills += 1
        running.wait()
        assert _stored(store) >= stored, "a finished trial was lost"
        stored = _stored(store)
    assert kills == 5
    done = ablate("--resume", "--stack", "1", "--jobs", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path) == numbers(undisturbed)


def _stored(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as base:
            count: int = base.execute("SELECT count(*) FROM trials").fetchone()[0]
        base.close()
        return count
    except sqlite3.OperationalError:  # not made yet, or being made
        return 0


def test_a_finished_trial_is_not_run_again(undisturbed: Path) -> None:
    again = ablate(*SMALL, "--out", str(undisturbed), "--format", "json")
    assert again.returncode == 0
    record = json.loads(again.stdout)
    assert record["format"] == "veriformer-ablation/1"
    assert record["trials"] == {"finished": 6, "missing": 0, "failures": {}}


def test_what_is_seen(undisturbed: Path) -> None:
    seen = ablate(*SMALL, "--out", str(undisturbed))
    assert "forced" in seen.stdout
    assert "✓ first, none: permutation changes no logit of 3 trained models" in seen.stdout
    assert "veriformer ablate positions --seeds 3 --task first --variant none" in seen.stdout
    assert "noise floor" in seen.stdout


def test_what_is_left_behind(undisturbed: Path) -> None:
    names = {path.name for path in undisturbed.iterdir()}
    assert {"index.html", "ablation.json", "table.md", "table.csv", "table.tex", "trials.sqlite"} <= names
    assert {"positions-forest.png", "positions-curves.png", "positions-entropy.png", "positions-attention.png"} <= names
    page = (undisturbed / "index.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script" not in page


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    command = [COMMAND, "ablate", *SMALL, "--out", str(tmp_path)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while _stored(tmp_path / "trials.sqlite") < 1:
        assert running.poll() is None
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert "go on with --resume" in errors
    assert json.loads((tmp_path / "ablation.json").read_text())["trials"]["finished"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["positons"], "there is no study 'positons' here; there are positions, residual, norm, warm-up"),
        (["positions", "--task", "sorting"], "there is no task 'sorting' here; there are precede, first, bigram"),
        (["positions", "--variant", "nope"], "there is no variant 'nope' here; there are learned, none, sinusoidal"),
        (["positions", "--seeds", "0"], "--seeds was 0; at least 1 is required, 12 are the default"),
        (["positions", "--seeds", "-3"], "--seeds was -3"),
        (["positions", "--device", "tpu"], "--device was 'tpu'; it must be cpu or cuda"),
        (["--resume"], "there is nothing to resume in"),
        (["positions", "--cluster", "here"], "--cluster was 'here'; it must be tcp://HOST:PORT"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    answer = ablate(*arguments, "--out", str(tmp_path / "out"))
    assert answer.returncode == 3
    assert message in answer.stderr.replace("\n", " ")
    assert "Traceback" not in answer.stderr


def test_cuda_where_there_is_none(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        answer = ablate(*SMALL, "--device", "cuda", "--out", str(tmp_path))
        assert answer.returncode == 0
    else:
        answer = ablate(*SMALL, "--device", "cuda", "--out", str(tmp_path))
        assert answer.returncode == 3
        assert "this machine has no CUDA device that torch can use; give --device cpu" in answer.stderr


def test_a_foreign_store(tmp_path: Path) -> None:
    (tmp_path / "trials.sqlite").write_text("not a database, not at all " * 100)
    answer = ablate(*SMALL, "--out", str(tmp_path))
    assert answer.returncode == 3
    assert "is no store of trials, or damaged" in answer.stderr


def test_studies_are_listed() -> None:
    told = json.loads(ablate("--list", "--format", "json").stdout)
    assert {"positions", "residual", "norm", "warm-up"} == {s["name"] for s in told if s["default"]}
    assert {"profile", "initialisation", "scaling-law", "views"} <= {s["name"] for s in told}


def test_too_few_seeds_are_announced_before_they_run(tmp_path: Path) -> None:
    seen = ablate(
        "positions", "--task", "majority", "--variant", "none", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path)
    )
    assert "2 seeds cannot reach a verdict" in seen.stderr
    assert "give --seeds 7 or more" in seen.stderr
    assert "too few seeds" in seen.stdout
