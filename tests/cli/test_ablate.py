"""`veriformer ablate` from outside: what a user sees, what a kill costs, what bad input gets."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from veriformer.ablations.execution import executors
from veriformer.ablations.execution.store import StoreError
from veriformer.cli.main import main
from veriformer.clusters.opening import ClusterError

ablate = importlib.import_module("veriformer.cli.ablate")  # the package knows the command by this name

COMMAND = str(Path(sys.executable).parent / "veriformer")
SMALL = ["ablate", "positions", "--task", "first", "--variant", "none", "--stack", "1", "--jobs", "1", "--seeds", "2"]
"""Four jobs of a second or two."""

ENDLESS = [*SMALL[:-1], "300"]
"""The same four and hundreds more: a run that is surely not over when a signal comes."""

Run = Callable[..., subprocess.CompletedProcess[str]]
Once = Callable[[str, Callable[[Path], None]], Path]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return what the report says, without times."""
    record = json.loads((folder / "ablation.json").read_text())
    return [{k: v for k, v in row.items() if k != "seconds"} for study in record["studies"] for row in study["rows"]]


@pytest.fixture(scope="session")
def undisturbed(once: Once, copies: None) -> Path:
    """Return what a whole run left behind, with what was seen of it; other workers read it too."""

    def run(folder: Path) -> None:
        with (folder / "output.txt").open("w") as seen, redirect_stdout(seen), pytest.raises(SystemExit) as ended:
            main([*SMALL, "--out", str(folder)])
        assert ended.value.code == 0

    return once("ablation", run)


def test_killed_and_interrupted_at_random_moments_it_ends_with_the_same_table(
    veriformer: Run, undisturbed: Path, tmp_path: Path
) -> None:
    store = tmp_path / "trials.sqlite"
    running = _begin(ENDLESS, tmp_path)
    _until(lambda: _count(store, "trials") > 0, running)
    time.sleep(random.random())  # any moment will do: nothing that follows depends on it
    running.kill()
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    stored = _count(store, "trials")
    running = _begin(ENDLESS, tmp_path)
    _until(lambda: _count(store, "trials") > stored, running)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 130, errors
    assert "go on with --resume" in errors
    assert json.loads((tmp_path / "ablation.json").read_text())["trials"]["finished"] > stored, "a trial was lost"
    veriformer("ablate", "--resume", "--seeds", "2", "--stack", "1", "--jobs", "1", "--out", str(tmp_path), status=0)
    assert numbers(tmp_path) == numbers(undisturbed)


def _begin(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, *arguments, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        # a shell that starts the tests in the background has them, and what they start, ignore the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def _until(holds: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 600  # for a run that hangs
    while not holds():
        assert running.poll() is None, "the run ended first"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def _count(path: Path, table: str) -> int:
    """Return the rows of a table of a store that another process writes to; 0 where it is not made yet."""
    try:
        base = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)
    except sqlite3.OperationalError:
        return 0
    try:
        return int(base.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    except sqlite3.OperationalError:  # being made
        return 0
    finally:
        base.close()


def test_a_finished_trial_is_not_run_again(veriformer: Run, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copy(undisturbed / "trials.sqlite", tmp_path)
    record = json.loads(veriformer(*SMALL, "--out", str(tmp_path), "--format", "json", status=0).stdout)
    assert record["format"] == "veriformer-ablation/1"
    assert record["trials"] == {"finished": 4, "missing": 0, "failures": {}}


def test_what_is_seen(undisturbed: Path) -> None:
    seen = (undisturbed / "output.txt").read_text()
    assert "forced" in seen
    assert "✓ first, none: permutation changes no logit of 2 trained models" in seen
    assert "veriformer ablate positions --seeds 2 --task first --variant none" in seen
    assert "noise floor" in seen


def test_too_few_seeds_are_announced_before_they_run(
    veriformer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_runs(cluster: str | None, processes: int, folder: Path) -> Any:
        raise ClusterError("nothing is run here")

    monkeypatch.setattr(executors, "open_executor", nothing_runs)
    few = ["positions", "--task", "majority", "--variant", "none", "--seeds", "2"]
    seen = veriformer("ablate", *few, "--out", str(tmp_path), status=3)
    warning, refusal, _ = seen.stderr.partition("nothing is run here")
    assert refusal
    assert "2 seeds cannot reach a verdict" in warning
    assert "there are up to 60 tests (Holm)" in warning  # of the whole study, of which 3 were asked for
    assert "give --seeds 12 or more" in warning


def test_the_first_seed_belongs_to_a_run_and_to_what_resumes_it(undisturbed: Path, tmp_path: Path) -> None:
    record = json.loads((undisturbed / "ablation.json").read_text())
    assert record["first_seed"] == 2000
    assert "2 seeds from 2000" in (undisturbed / "output.txt").read_text()
    nothing: dict[str, Any] = dict.fromkeys(ablate._CHOSEN)
    usual = ablate._settings(nothing, None, tmp_path)
    assert usual["first_seed"] == 2000
    assert "--first-seed" not in ablate._command(usual, None)
    chosen = ablate._settings({**nothing, "first_seed": 0}, None, tmp_path)
    assert chosen["first_seed"] == 0
    assert ablate._settings(nothing, chosen, tmp_path)["first_seed"] == 0
    assert "--first-seed 0" in ablate._command(chosen, None)
    with pytest.raises(StoreError, match="the first_seed of its last run are '1'"):
        ablate._settings(nothing, {**chosen, "first_seed": "1"}, tmp_path)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["positons"], "there is no study 'positons' here; there are table, positions, residual, norm, warm-up"),
        (["positions", "--task", "sorting"], "there is no task 'sorting' here; there are precede, first, bigram"),
        (["positions", "--variant", "nope"], "there is no variant 'nope' here; there are learned, none, sinusoidal"),
        (["positions", "--seeds", "0"], "--seeds was 0; at least 1 is required, 12 are the default"),
        (["positions", "--seeds", "-3"], "--seeds was -3"),
        (["positions", "--first-seed", "-1"], "Invalid value for '--first-seed': -1 is not in the range"),
        (["positions", "--device", "tpu"], "--device was 'tpu'; it must be cpu or cuda"),
        (["--resume"], "there is nothing to resume in"),
        (["positions", "--cluster", "here"], "--cluster was 'here'; it must be tcp://HOST:PORT"),
    ],
)
def test_bad_input_gets_one_sentence(veriformer: Run, arguments: list[str], message: str, tmp_path: Path) -> None:
    answer = veriformer("ablate", *arguments, "--out", str(tmp_path / "out"), status=3)
    assert message in answer.stderr.replace("\n", " ")
    assert "Traceback" not in answer.stderr


def test_cuda_where_there_is_none(veriformer: Run, tmp_path: Path) -> None:
    import torch

    answer = veriformer(*SMALL, "--device", "cuda", "--out", str(tmp_path))
    if torch.cuda.is_available():
        assert answer.returncode == 0
    else:
        assert answer.returncode == 3
        assert "this machine has no CUDA device that torch can use; give --device cpu" in answer.stderr


def test_a_foreign_store(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "trials.sqlite").write_text("not a database, not at all " * 100)
    answer = veriformer(*SMALL, "--out", str(tmp_path), status=3)
    assert "is no store of trials, or damaged" in answer.stderr


def test_studies_are_listed(veriformer: Run) -> None:
    told = json.loads(veriformer("ablate", "--list", "--format", "json", status=0).stdout)
    assert [s["name"] for s in told if s["default"]] == [told[0]["name"]] == ["table"]
    assert {"positions", "residual", "norm", "warm-up", "profile", "initialisation", "scaling-law", "views"} <= {
        s["name"] for s in told
    }
