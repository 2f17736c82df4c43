"""Code that lies in the folder of a command, under names that Python has, runs in no process that was not told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest

from veriformer.ablations.execution import executors
from veriformer.cli.processes import hosting, template
from veriformer.cli.processes.limits import Limits
from veriformer.cli.processes.worker import Worker
from veriformer.clusters import opening
from veriformer.clusters.safe_path import deaf_to_interrupts, safe_path, safe_path_by_environment

SHADOWED = ("json", "socket", "random", "signal", "selectors", "pickle", "multiprocessing", "struct", "tempfile")
SERVERS = """
import os, sys
from multiprocessing import forkserver, resource_tracker
{enter}
server = forkserver.ForkServer()
with {block}:
    server.ensure_running()
for held in (server._forkserver_alive_fd, resource_tracker._resource_tracker._fd):
    os.close(held)  # they end by themselves
for pid in (server._forkserver_pid, resource_tracker._resource_tracker._pid):
    os.waitpid(pid, 0)
"""
ENTER = "from contextlib import nullcontext; from veriformer.clusters.safe_path import safe_path"


@pytest.mark.parametrize(("block", "runs"), [("safe_path()", False), ("nullcontext()", True)])
def test_a_server_of_multiprocessing_runs_nothing_of_the_folder(tmp_path: Path, block: str, runs: bool) -> None:
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').close()\nraise SystemExit\n")
    (program := tmp_path / "elsewhere" / "program.py").parent.mkdir()  # its own path begins there, not in the folder
    program.write_text(SERVERS.format(enter=ENTER, block=block))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    if not sys.flags.safe_path:  # else the whole of this run is safe
        assert (tmp_path / "ran").exists() is runs, done.stderr
    assert runs or done.returncode == 0, done.stderr


class _StartedError(Exception):
    pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Note the commands by which servers would be started, and start none."""
    commands: list[list[str]] = []

    def note(path: object, words: Any, *others: object) -> int:
        commands.append([os.fsdecode(word) for word in words])
        raise _StartedError

    monkeypatch.setattr(util, "spawnv_passfds", note)
    server, tracker = forkserver.ForkServer(), resource_tracker.ResourceTracker()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "ensure_running", server.ensure_running)
    monkeypatch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
    monkeypatch.setattr(resource_tracker, "_resource_tracker", tracker)
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    monkeypatch.setattr(resource_tracker, "getfd", tracker.getfd)
    yield commands
    assert commands
    assert all("-P" in words for words in commands), commands


def _train() -> None:
    with executors.local(1):
        executors._copies().Process().start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what was not started is not closed
@pytest.mark.parametrize(
    "begin",
    [
        lambda: template.start(template.template()),
        lambda: Worker({}, Limits()),
        _train,
    ],
    ids=["template", "worker", "ablate"],
)
def test_every_door_starts_its_servers_so(started: list[list[str]], begin: Callable[[], object]) -> None:
    with pytest.raises(_StartedError):
        begin()


def test_a_host_of_a_cluster_is_started_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(hosting.subprocess, "Popen", lambda words, **_: commands.append(words))
    hosting._Host("run", str(tmp_path))
    assert commands[0][1:3] == ["-P", "-c"]


def test_a_batch_system_is_told_so_and_the_job_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    there: list[str | None] = []

    class Batch:
        def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
            there.append(os.environ.get("PYTHONSAFEPATH"))
            there.append(function(*arguments))

            class Job:
                def done(self) -> bool:
                    return True

                def result(self) -> None:
                    return None

            return Job()

    jobs = opening._Batch(Batch())
    jobs.submit(os.environ.get, "PYTHONSAFEPATH").result(60)
    assert there == ["1", None]
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    with safe_path_by_environment() as begun:
        assert begun(os.environ.get, "PYTHONSAFEPATH") == "1"
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_nothing_of_it_is_left_for_others() -> None:
    usual = util._args_from_interpreter_flags()
    with safe_path():
        assert {*util._args_from_interpreter_flags()} == {*usual, "-P"}
    assert util._args_from_interpreter_flags() == usual
    assert "PYTHONSAFEPATH" not in os.environ or sys.flags.safe_path


def test_a_server_does_not_hear_ctrl_c_while_it_imports() -> None:
    before = signal.getsignal(signal.SIGINT)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    with deaf_to_interrupts():
        assert subprocess.run([sys.executable, "-S", "-c", code], check=False).returncode == 0
    assert signal.getsignal(signal.SIGINT) is before
