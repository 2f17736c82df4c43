"""Where jobs run: a worker that dies costs nothing, a cluster gives the same numbers as this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from veriformer.ablations.execution.executors import ClusterError, batch_system, local, open_executor, run_jobs
from veriformer.ablations.execution.plan import Job
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

CONFIG = {
    "architecture": "classifier", "vocab_size": 8, "num_classes": 2, "d_model": 8, "num_heads": 2, "num_layers": 1,
    "max_len": 8,
}  # fmt: skip


def jobs(number: int, steps: int = 3) -> list[Job]:
    recipe = Recipe(steps=steps)
    return [Job((Trial(task="precede", config=CONFIG, recipe=recipe, seed=i),)) for i in range(number)]


def accuracies(executor: Any, wanted: list[Job]) -> dict[int, float]:
    found = {}
    for job, outcome in run_jobs(executor, wanted, ahead=4):
        assert not isinstance(outcome, BaseException), outcome
        found[job.trials[0].seed] = outcome["records"][0]["loss"]
    return found


class Deadly:
    """An executor whose workers die the first times; then it does the work itself."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.asked = deaths, 0

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
        from pebble import ProcessExpired

        self.asked += 1
        future: Future[Any] = Future()
        if self.asked <= self.deaths:
            future.set_exception(ProcessExpired("the worker died", 9))
        else:
            future.set_result({"records": [{"loss": 0.0}]})
        return future


def test_a_job_whose_worker_dies_is_begun_again() -> None:
    executor = Deadly(deaths=2)
    ((_, outcome),) = run_jobs(executor, jobs(1), ahead=1)
    assert not isinstance(outcome, BaseException)
    assert executor.asked == 3


def test_a_job_that_kills_every_worker_is_given_up_and_reported() -> None:
    executor = Deadly(deaths=100)
    ((_, outcome),) = run_jobs(executor, jobs(1), ahead=1)
    assert isinstance(outcome, BaseException)
    assert executor.asked == 3


def test_a_killed_worker_of_this_machine_loses_nothing() -> None:
    wanted = jobs(6, steps=30)
    with local(1) as executor:
        found: dict[int, float] = {}
        for count, (job, outcome) in enumerate(run_jobs(executor, wanted, ahead=2)):
            assert not isinstance(outcome, BaseException), outcome
            found[job.trials[0].seed] = outcome["records"][0]["loss"]
            if count == 1:
                for child in _children(os.getpid()):
                    os.kill(child, signal.SIGKILL)
        assert sorted(found) == list(range(6))
        again = accuracies(executor, wanted)
    assert found == again


def _children(parent: int) -> list[int]:
    told = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in told.splitlines() if "spawn_main" in line]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A real scheduler and two workers, processes of their own, on loopback."""
    file = tmp_path / "scheduler.json"
    place = ("--host", "127.0.0.1", "--no-dashboard")
    scheduler = start("dask_scheduler", "--port", "0", "--scheduler-file", str(file), *place)
    while not file.exists():
        assert scheduler.poll() is None, "the scheduler ended"
        time.sleep(0.05)
    address = json.loads(file.read_text())["address"]
    workers = [start("dask_worker", address, "--nthreads", "1", "--no-nanny", *place) for _ in range(2)]
    yield address, workers
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


def test_a_cluster_that_loses_a_worker_gives_the_same_numbers(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    address, workers = cluster
    wanted = jobs(12, steps=40)
    found: dict[int, float] = {}
    with open_executor(address, 1, tmp_path) as executor:
        for count, (job, outcome) in enumerate(run_jobs(executor, wanted, ahead=12)):
            assert not isinstance(outcome, BaseException), outcome
            found[job.trials[0].seed] = outcome["records"][0]["loss"]
            if count == 2:
                workers[0].kill()
    with local(1) as executor:
        assert found == accuracies(executor, wanted)


def test_submitit_gives_the_same_numbers(tmp_path: Path) -> None:
    wanted = jobs(2)
    with batch_system("local", tmp_path) as executor:
        found = accuracies(executor, wanted)
    with local(1) as executor:
        assert found == accuracies(executor, wanted)


def test_a_trial_that_fails_is_reported_and_the_rest_goes_on() -> None:
    wrong = Job((Trial(task="precede", config={**CONFIG, "d_model": 7}, recipe=Recipe(steps=3)),))
    with local(1) as executor:
        outcomes = {len(job.trials[0].config): out for job, out in run_jobs(executor, [wrong], ahead=1)}
        (outcome,) = outcomes.values()
        assert isinstance(outcome, ValueError)
        assert "num_heads must divide d_model" in str(outcome)
        assert len(accuracies(executor, jobs(2))) == 2


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:9", r"no Dask scheduler answers at tcp://127\.0\.0\.1:9 .*start one with `dask scheduler`"),
        ("127.0.0.1:8786", r"--cluster was '127\.0\.0\.1:8786'; it must be tcp://HOST:PORT"),
        ("submitit:nonsense", r"submitit cannot use 'nonsense' here"),
    ],
)
def test_a_cluster_that_is_not_there(
    address: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from veriformer.ablations.execution import executors

    monkeypatch.setattr(executors, "CONNECT_SECONDS", 1.0)
    with pytest.raises(ClusterError, match=message), open_executor(address, 1, tmp_path):
        pass


def test_stopping_cancels_what_was_not_begun() -> None:
    futures: list[Future[Any]] = []

    class Slow:
        def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            futures.append(future)
            if len(futures) == 1:
                future.set_result({"records": []})
            return future

    running = run_jobs(Slow(), jobs(5), ahead=3)
    next(running)
    running.close()
    assert all(f.cancelled() for f in futures[1:])
