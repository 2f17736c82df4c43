"""Where jobs run: a worker that dies costs nothing, a cluster gives the same numbers as this machine."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dask_cluster import DaskCluster
from veriformer.ablations.execution.executors import local, open_executor, run_jobs
from veriformer.ablations.execution.plan import Job
from veriformer.ablations.execution.work import train_job
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial
from veriformer.clusters import opening
from veriformer.clusters.opening import ClusterError, batch_system

CONFIG = {
    "architecture": "classifier", "vocab_size": 8, "num_classes": 2, "d_model": 8, "num_heads": 2, "num_layers": 1,
    "max_len": 8,
}  # fmt: skip


def jobs(number: int, steps: int = 3) -> list[Job]:
    recipe = Recipe(steps=steps)
    return [Job((Trial(task="precede", config=CONFIG, recipe=recipe, seed=i),)) for i in range(number)]


def losses(executor: Any, wanted: list[Job]) -> dict[int, float]:
    found = {}
    for job, outcome in run_jobs(executor, wanted, ahead=4):
        assert not isinstance(outcome, BaseException), outcome
        found[job.trials[0].seed] = outcome["records"][0]["loss"]
    return found


def losses_here(wanted: list[Job]) -> dict[int, float]:
    return {job.trials[0].seed: train_job(job.trials)["records"][0]["loss"] for job in wanted}


def process_of(executor: Any) -> int:
    pid: int = executor.submit(os.getpid).result()
    return pid


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


class Deathbed:
    """An executor of one process, which is killed in the middle of the third job."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked, self.process = inner, 0, process_of(inner)

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
        self.asked += 1
        if self.asked != 3:
            return self.inner.submit(function, *arguments)  # type: ignore[no-any-return]
        job: Future[Any] = self.inner.submit(time.sleep, 3600.0)  # one that is surely not over when the signal comes
        while not job.running():
            time.sleep(0.01)
        os.kill(self.process, signal.SIGKILL)
        return job


def test_a_killed_worker_of_this_machine_loses_nothing(copies: None) -> None:
    wanted = jobs(4)
    with local(1) as executor:
        dying = Deathbed(executor)
        assert losses(dying, wanted) == losses_here(wanted)
        assert dying.asked >= 5  # one again; all that waited, where the pool noticed late and broke
        assert process_of(executor) != dying.process


def test_a_worker_that_dies_between_two_jobs_loses_nothing(copies: None) -> None:
    wanted = jobs(2)
    with local(1) as executor:
        os.kill(process_of(executor), signal.SIGKILL)
        while executor.pool.active:  # type: ignore[attr-defined]
            time.sleep(0.01)
        assert losses(executor, wanted) == losses_here(wanted)


def test_a_cluster_that_loses_a_worker_gives_the_same_numbers(cluster: DaskCluster, tmp_path: Path) -> None:
    wanted = jobs(8, steps=10)
    found: dict[int, float] = {}
    with open_executor(cluster.address, 1, tmp_path) as executor:
        for count, (job, outcome) in enumerate(run_jobs(executor, wanted, ahead=8)):
            assert not isinstance(outcome, BaseException), outcome
            found[job.trials[0].seed] = outcome["records"][0]["loss"]
            if count == 2:
                cluster.workers[0].kill()
    assert found == losses_here(wanted)


def test_submitit_gives_the_same_numbers(tmp_path: Path) -> None:
    wanted = jobs(1)
    with batch_system("local", tmp_path) as executor:
        assert losses(executor, wanted) == losses_here(wanted)


def test_a_trial_that_fails_is_reported_and_the_rest_goes_on(copies: None) -> None:
    wrong = Job((Trial(task="precede", config={**CONFIG, "d_model": 7}, recipe=Recipe(steps=3)),))
    with local(1) as executor:
        outcomes = {len(job.trials[0].config): out for job, out in run_jobs(executor, [wrong], ahead=1)}
        (outcome,) = outcomes.values()
        assert isinstance(outcome, ValueError)
        assert "num_heads must divide d_model" in str(outcome)
        assert len(losses(executor, jobs(2))) == 2


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
    monkeypatch.setattr(opening, "CONNECT_SECONDS", 1.0)
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
