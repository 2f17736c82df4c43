"""`--cluster`: the rows and bytes of this machine, whoever dies or is interrupted on the way."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from dask_cluster import DaskCluster
from veriformer.cli.processes import elsewhere, hosting
from veriformer.cli.processes.asking import RefusedError
from veriformer.cli.processes.elsewhere import Elsewhere, PoolElsewhere
from veriformer.clusters import opening, slurm
from veriformer.clusters.attempts import is_death
from veriformer.clusters.opening import ClusterError

Run = Callable[..., subprocess.CompletedProcess[str]]
SETTINGS = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": (), "call_seconds": 30.0, "named": ()}
PATIENT = ("--stable", "--format", "json")
MUTANTS = ("mutants", "--only", "SC01", "--only", "SC04", "--only", "SC05", "--only", "SC07", *PATIENT)
SWEEP = ("sweep", "reference:softmax", "torch:softmax", "torch:LayerNorm", "reference:layer-norm", *PATIENT)

ONE_WAITS = """
import os, time
from models import gpt
from veriformer.properties import Subject


def forward(model, tokens):
    try:
        os.close(os.open("waiting", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return model(tokens)
    with open("process", "w") as file:
        file.write(str(os.getpid()) + ".")
    time.sleep(3600)  # until the worker is killed


waits = Subject(kind="decoder", build=gpt(2).build, forward=forward, declares={"causal": True})
"""


def in_the_middle(stored: Path, happens: Callable[[], None]) -> threading.Thread:
    """Let something happen as soon as there is something in a file."""

    def watch() -> None:
        while not (stored.exists() and stored.stat().st_size):
            time.sleep(0.02)
        happens()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    return watching


def test_a_check_whose_worker_is_killed_gives_the_same_bytes(
    veriformer: Run, cluster: DaskCluster, tmp_path: Path
) -> None:
    (tmp_path / "one_waits.py").write_text(ONE_WAITS)
    call = ("check", "one_waits.py:waits", "models.py:right", "--only", "causality", "--profile", "quick",
            "--call-seconds", "3600", *PATIENT)  # fmt: skip
    killed: list[int] = []

    def kill() -> None:
        judging = int((tmp_path / "process").read_text().rstrip("."))
        above = {process.pid for process in psutil.Process(judging).parents()}
        (worker,) = (w for w in cluster.workers if w.pid in above)
        worker.kill()
        killed.append(worker.pid)

    watching = in_the_middle(tmp_path / "process", kill)
    there = veriformer(*call, "--cluster", cluster.address, "--out", "out", status=1)
    (tmp_path / "out").rename(tmp_path / "there")
    watching.join()
    assert len(killed) == 1
    here = veriformer(*call, "--out", "out", status=1)  # the same name: commands in the pages tell it
    (tmp_path / "out").rename(tmp_path / "here")
    assert there.stdout == here.stdout
    for file in (p.relative_to(tmp_path / "here") for p in (tmp_path / "here").rglob("*") if p.is_file()):
        assert (tmp_path / "there" / file).read_bytes() == (tmp_path / "here" / file).read_bytes(), file


@pytest.mark.parametrize("call", [MUTANTS, SWEEP], ids=lambda call: call[0])
def test_rows_are_the_same_when_a_worker_is_killed(
    veriformer: Run, cluster: DaskCluster, tmp_path: Path, call: tuple[str, ...]
) -> None:
    here = veriformer(*call, "--out", "here", status=0)
    kills = in_the_middle(tmp_path / "there" / "judged.jsonl", cluster.workers[0].kill)
    there = veriformer(*call, "--out", "there", "--cluster", cluster.address, status=0)
    kills.join()
    assert there.stdout == here.stdout


def test_an_interrupted_run_goes_on_where_it_was(veriformer: Run, cluster: DaskCluster, tmp_path: Path) -> None:
    store = tmp_path / "there" / "judged.jsonl"
    code = "from veriformer.cli.main import main; main()"
    call = ("sweep", "reference:softmax", "torch:softmax", "--out", "there", *PATIENT, "--cluster", cluster.address)
    first = subprocess.Popen(
        [sys.executable, "-c", code, *call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell that starts the tests in the background has them, and what they start, ignore the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    in_the_middle(store, lambda: first.send_signal(signal.SIGINT)).join()
    out, errors = first.communicate()
    assert json.loads(out) == json.loads((tmp_path / "there" / "report.json").read_text())
    if first.returncode == 130:  # else all was judged before the signal came
        assert "the same command goes on" in " ".join(errors.split())
    row = next(line for line in store.read_text().splitlines() if line)
    store.write_text(f"{row}\n{row[:20]}")
    there = veriformer(*call, status=0)
    assert "1 of 2 models were judged before" in " ".join(there.stderr.split())
    assert there.stdout == veriformer("sweep", *call[1:3], "--out", "here", *PATIENT, status=0).stdout


def test_submitit_gives_the_same_bytes(veriformer: Run) -> None:
    call = ("mutants", "--only", "SC01", "--only", "SC04", *PATIENT)
    there = veriformer(*call, "--cluster", "submitit:local", "-n", "1", "--out", "there", status=0)
    assert there.stdout == veriformer(*call, "--out", "here", status=0).stdout


def test_a_job_that_left_slurms_queue_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, told = tmp_path / "squeue", tmp_path / "told"
    queue.write_text(f"#!/bin/sh\nexec cat {told}\n")
    queue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_ASKED_EVERY", 0.0)
    asked = slurm.Queue()
    assert not any(asked.has_lost("7") for _ in range(4)), "the controller did not answer"
    told.write_text("7\n8\n")
    assert not any(asked.has_lost("7") for _ in range(4))
    told.write_text("8\n")
    assert [asked.has_lost("7") for _ in range(4)] == [False, False, True, True]
    told.write_text("7\n8\n")
    assert not asked.has_lost("7"), "begun again"


def test_a_job_that_is_lost_ends_as_a_death() -> None:
    class Waits:
        job_id = "7"

        def done(self) -> bool:
            return False

    class Gone(slurm.Queue):
        def has_lost(self, job: str) -> bool:
            return True

    future = Future[Any]()
    opening._follow(Waits(), future, threading.Event(), Gone())
    problem = future.exception(timeout=0)
    assert problem is not None
    assert is_death(problem)


def test_workers_without_veriformer_are_told_of(veriformer: Run, scheduler: DaskCluster) -> None:
    scheduler.add_worker("--no-nanny", before="import sys; sys.modules['veriformer'] = None")
    done = veriformer("check", "torch:softmax", "--cluster", scheduler.address, status=3)
    told = " ".join(done.stderr.split())
    assert "a worker of the cluster cannot judge (ModuleNotFoundError: " in told
    assert "install the same release of veriformer for all of them" in told


class Lost:
    """A Dask client whose scheduler went away: it looks for it, in vain."""

    def __init__(self) -> None:
        self.looked = 0

    @property
    def status(self) -> str:
        self.looked += 1
        return "connecting" if self.looked < 3 else "closed"

    def get_executor(self, pure: bool) -> None:
        return None


def test_a_scheduler_that_is_lost_is_told_of() -> None:
    for ask in (lambda dask: dask.submit(os.getpid), lambda dask: dask.width()):
        with pytest.raises(ClusterError, match=r"the Dask scheduler at tcp://h:1 is gone .* give the same command"):
            ask(opening._Dask(Lost(), "tcp://h:1"))


class Leaving(ThreadPoolExecutor):
    """A cluster of one worker, this process, that goes away after so many jobs."""

    rounds = 1

    def __init__(self, jobs: int) -> None:
        super().__init__(1)
        self.jobs = jobs

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        self.jobs -= 1
        if self.jobs < 0:
            raise ClusterError("the cluster is gone")
        return super().submit(function, *arguments)

    def width(self) -> int:
        return 1

    def tell(self, function: Any, /, *arguments: Any) -> None:
        function(*arguments)


def test_what_was_known_is_told_where_the_cluster_is_lost(veriformer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def workers_of(cluster: str, at_once: int | None, **limits: Any) -> Elsewhere:
        there = Elsewhere(leaving, at_once)
        click.get_current_context().call_on_close(there.leave)
        return there

    call = ("check", "models.py:leaky", "--only", "causality", "--profile", "quick", "--cluster", "here", *PATIENT)
    monkeypatch.setattr("veriformer.cli.check.workers_of", workers_of)
    with Leaving(jobs=4) as leaving:  # two select and load, the third sends canaries
        done = veriformer(*call, status=130)
    assert "Error: the cluster is gone; what follows is what was known by then" in " ".join(done.stderr.split())
    assert json.loads(done.stdout)["subjects"][0]["results"]
    with Leaving(jobs=0) as leaving:
        assert "Error: the cluster is gone" in veriformer(*call, status=3).stderr


ENDS = """
import os
from models import gpt
from veriformer.properties import Subject


def forward(model, tokens):
    os.write(1, b"last words\\n")
    os._exit(9)


ends = Subject(kind="decoder", build=gpt(2).build, forward=forward, declares={"causal": True})
"""


def test_what_ends_its_process_there_is_told_and_given_up_as_here(
    veriformer: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def workers_of(cluster: str, at_once: int | None, **limits: Any) -> Elsewhere:
        there = Elsewhere(inside, at_once)
        click.get_current_context().call_on_close(there.leave)
        return there

    (tmp_path / "ends.py").write_text(ENDS)
    call = ("check", "ends.py:ends", "nothing.gone:mine", "--only", "numerics", "--profile", "quick", *PATIENT[1:])
    monkeypatch.setattr("veriformer.cli.check.workers_of", workers_of)
    with Leaving(jobs=1000) as inside:
        refused = veriformer(*call, "--cluster", "here", status=3)
        assert "'nothing.gone' cannot be imported" in refused.stderr
        there = json.loads(veriformer(*call[:2], *call[3:], "--cluster", "here", status=2).stdout)
    here = json.loads(veriformer(*call[:2], *call[3:], "-n", "1", status=2).stdout)
    (subject,), (same,) = there["subjects"], here["subjects"]
    told = [(r["id"], r["outcome"], r["reason"]) for r in subject["results"] if r["outcome"] != "NOT_APPLICABLE"]
    assert told == [(r["id"], r["outcome"], r["reason"]) for r in same["results"] if r["outcome"] != "NOT_APPLICABLE"]
    assert [outcome for _, outcome, _ in told[:4]] == ["ERROR"] * 3 + ["BLOCKED"]
    assert told[0][2].endswith("ended with status 9 while the subject was judged; its last words: last words")
    assert subject["printed"] == same["printed"] == {"size": 33, "text": "last words\n" * 3}


@pytest.mark.parametrize("command", [("check", "torch:softmax"), ("sweep", "torch:softmax"), ("mutants",)])
@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "127.0.0.1:8786",
            "--cluster was '127.0.0.1:8786'; it must be tcp://HOST:PORT of a Dask scheduler",
        ),
        ("tcp://127.0.0.1:9", "no Dask scheduler answers at tcp://127.0.0.1:9"),
        ("submitit:nonsense", "submitit cannot use 'nonsense' here"),
    ],
)
def test_a_cluster_that_is_not_there(
    veriformer: Run, command: tuple[str, ...], address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CONNECT_SECONDS", 1.0)
    done = veriformer(*command, "--cluster", address, status=3)
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


class Scripted:
    """A cluster that answers every call with the same."""

    rounds = 1

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self.outcome, BaseException):
            future.set_exception(self.outcome)
        else:
            future.set_result(self.outcome)
        return future

    def width(self) -> int:
        return 2

    def tell(self, function: Any, /, *arguments: Any) -> None:
        pass


def asked(outcome: Any) -> dict[str, Any]:
    return PoolElsewhere(Elsewhere(Scripted(outcome)), {}, 0).ask("select")


def answered(**given: Any) -> dict[str, Any]:
    return {"found": [{"answer": None, "lost": None, "printed": {"kept": b"", "size": 0}, **given}], "falls": 0}


def envelope(**given: Any) -> dict[str, Any]:
    return {"machine": "node7", "has_folder": True, "release": elsewhere._own_release(), **given}


def test_a_worker_with_other_versions_is_refused() -> None:
    other = {**elsewhere._own_release(), "torch": "1.0"}
    with pytest.raises(ClusterError, match=r"a worker on node7 has torch 1\.0 \(here .*\); install the same versions"):
        asked(envelope(answer=answered(answer={}), release=other))


def test_a_failure_of_our_own_there_is_told_as_such() -> None:
    with pytest.raises(ClusterError, match=r"veriformer itself failed on node7: KeyError: 'x' \(please report this\)"):
        asked(envelope(failed="KeyError: 'x'"))


def test_a_folder_that_workers_do_not_have_is_told_beside_what_is_refused() -> None:
    lost = {"why": "there is no file 'a.py'", "outcome": "ERROR", "is_usage": True}
    refused = envelope(answer=answered(lost=lost), has_folder=False)
    with pytest.raises(RefusedError, match=r"there is no file 'a\.py' \(the worker on node7 has no folder /.*share it"):
        asked(refused)


def test_workers_that_all_die_are_told_of() -> None:
    class KilledWorker(Exception):  # noqa: N818, the name that Dask gives it
        pass

    with pytest.raises(RefusedError, match="the workers of the cluster that judged it died, 3 times"):
        asked(KilledWorker())


@pytest.fixture
def run() -> Iterator[str]:
    name = f"a run of {os.getpid()} at {time.monotonic()}"
    yield name
    hosting.leave(name)


def test_a_host_is_kept_for_its_run_and_stands_where_it_can(run: str, tmp_path: Path) -> None:
    chore = pickle.dumps(("judge", (SETTINGS, 0, "", 0, [])))
    first = hosting.done_there(run, str(tmp_path / "not there"), chore)
    assert first["answer"] == {"found": [], "falls": 0}
    assert first["release"] == elsewhere._own_release()
    assert not first["has_folder"]
    (host,) = (h for h in hosting._hosts if h.run == run)
    hosting.done_there(run, str(tmp_path / "not there"), chore)
    assert [h for h in hosting._hosts if h.run == run] == [host]
    os.kill(host._process.pid, signal.SIGKILL)
    again = hosting.done_there(run, str(tmp_path), chore)
    assert again["answer"] == first["answer"], "another one takes its place"
    unknown = hosting.done_there(run, str(tmp_path), pickle.dumps(("nothing", ())))
    assert unknown["failed"] == "AttributeError: 'Chores' object has no attribute 'nothing'"


def test_a_run_that_ends_leaves_no_process(run: str, tmp_path: Path) -> None:
    sleeps = hosting.Question("call", {"function": "time:sleep", "arguments": [3600.0]}, 3600.0, "it was judged", ())
    chore = pickle.dumps(("judge", (SETTINGS, 0, "", 0, [sleeps])))
    ended: list[Any] = []
    judging = threading.Thread(target=lambda: ended.append(hosting.done_there(run, str(tmp_path), chore)))
    judging.start()
    found: list[psutil.Process] = []
    while len(found) < 3:  # the template, what tracks its resources, and the one that sleeps
        (host,) = [h for h in hosting._hosts if h.run == run] or [None]
        found = psutil.Process(host._process.pid).children(recursive=True) if host else []
        time.sleep(0.05)
    hosting.leave(run)
    judging.join()
    psutil.wait_procs(found)
    assert ended == [{"lost": "the run was ended"}]
