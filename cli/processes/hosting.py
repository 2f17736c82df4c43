"""The far side of `elsewhere`: a process beside each worker of a cluster, that judges there as a command does here.

Workers are threads of somebody's process, which may start no process that judges and must not hang, crash or import
the user's code. So each has a host: a plain Python process, in the folder of the command, that asks and judges
with the same limits. It ends with its worker and with the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from veriformer.cli.processes.asking import Lost, Pool, Task
from veriformer.cli.processes.judged_store import release
from veriformer.clusters.safe_path import SAFE_PATH

_BEGUN = 3  # times a chore is given to a host, when hosts die under it: the system ends what takes its memory
_IDLE = 60.0  # seconds after which a host ends that nobody asks any more: its run was killed
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from veriformer.cli.processes.hosting import main; main()"
_hosts: list[_Host] = []
_ended: set[str] = set()
_lock = threading.Lock()


# Called in a worker. -------------------------------------------------------------------------------------------------


def done_there(run: str, folder: str, chore: bytes) -> dict[str, Any]:
    """Let a host of this worker do a chore; kept for the next one of the same run.

    Args:
        run: name of the run.
        folder: that the command was given in; the host stands there, if this machine has it.
        chore: a pickled method of `Chores` with its arguments, that this process never looks into.

    Returns:
        `answer`, `release`, `machine` and `has_folder`; or `lost`, why there is none.
    """
    told = ""
    for _ in range(_BEGUN):
        if run in _ended:
            return {"lost": "the run was ended"}
        host = _take(run, folder)
        try:
            answer = host.do(chore)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            told = host.end()
            continue
        _keep(host)
        return {**answer, "machine": socket.gethostname(), "has_folder": host.has_folder}
    return {"lost": f"the process that judged on {socket.gethostname()} ended with status {told}, {_BEGUN} times"}


def leave(run: str) -> None:
    """End the hosts of a run, whatever they are doing."""
    with _lock:
        _ended.add(run)
        leaving = [host for host in _hosts if host.run == run]
        _hosts[:] = [host for host in _hosts if host.run != run]
    for host in leaving:
        host.close()


class _Host:
    """A host, seen from its worker."""

    def __init__(self, run: str, folder: str) -> None:
        self.run, self.has_folder, self.is_idle, self.since = run, Path(folder).is_dir(), False, 0.0
        self._process = subprocess.Popen(
            [sys.executable, SAFE_PATH, "-c", _CODE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder if self.has_folder else None,
            start_new_session=True,  # Ctrl-C for a command on the same terminal is none for it
        )

    def do(self, chore: bytes) -> dict[str, Any]:
        """Hand over a chore and wait for its end.

        Raises:
            EOFError, OSError, ValueError, UnpicklingError: the process is gone.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        pickle.dump(chore, stdin)
        stdin.flush()
        answer: dict[str, Any] = pickle.load(stdout)
        return answer

    def close(self) -> None:
        """Let it end: it does when nobody can ask it any more."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        threading.Thread(target=self._bury, daemon=True).start()

    def end(self) -> str:
        """End it at once; return the status that it ended with."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        return self._bury()

    def _bury(self) -> str:
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it never read
                pipe.close()
        return str(status)


def _take(run: str, folder: str) -> _Host:
    with _lock:
        for host in _hosts:
            if host.is_idle and host.run == run:
                host.is_idle = False
                return host
        host = _Host(run, folder)
        _hosts.append(host)
        return host


def _keep(host: _Host) -> None:
    with _lock:
        host.is_idle, host.since = True, time.monotonic()
    later = threading.Timer(_IDLE + 1, _expire, (host,))
    later.daemon = True
    later.start()


def _expire(host: _Host) -> None:
    with _lock:
        if host not in _hosts or not host.is_idle or time.monotonic() - host.since < _IDLE:
            return
        _hosts.remove(host)
    host.close()


class Question(NamedTuple):
    """What a host asks a process of its own: a `Task` of which nothing is to be called."""

    name: str
    arguments: dict[str, Any]
    seconds: float
    doing: str
    modules: tuple[str, ...] | None = None


# Called in a host. ---------------------------------------------------------------------------------------------------


class Chores:
    """What a host does; its processes are kept from one chore to the next."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def judge(
        self, settings: dict[str, Any], memory_gib: float, home: str, falls: int, questions: Sequence[Question]
    ) -> dict[str, Any]:
        """Ask questions in turn.

        Args:
            settings: as for `Pool`.
            memory_gib: as for `Pool`.
            home: target whose process is asked.
            falls: times that such processes are known to have ended or hung.
            questions: in which order.

        Returns:
            `found`, of each question `answer` or `lost`, and what was `printed`; and how often it fell meanwhile.
        """
        if self._pool is None:  # of one run, whose settings are the same
            self._pool = Pool(1, settings, memory_gib)
        self._pool.falls[home] = before = max(falls, self._pool.falls[home])
        found: list[dict[str, Any]] = [{"answer": None, "lost": None} for _ in questions]
        tasks = [_task(home, question, outcome) for question, outcome in zip(questions, found, strict=True)]
        self._pool.run(tasks)
        for task, outcome in zip(tasks, found, strict=True):
            outcome["printed"] = vars(task.told)
        return {"found": found, "falls": self._pool.falls[home] - before}

    def close(self) -> None:
        """Let the processes end."""
        if self._pool is not None:
            self._pool.__exit__()


def _task(home: str, question: Question, outcome: dict[str, Any]) -> Task:
    """Return the task that puts into `outcome` what came of a question."""

    def done(answer: dict[str, Any]) -> None:
        outcome["answer"] = answer

    def lost(why: Lost) -> None:
        outcome["lost"] = vars(why)

    return Task(question.name, lambda: question.arguments, done, lost, [], question.seconds, home,
                doing=question.doing, modules=question.modules)  # fmt: skip


def main() -> None:
    """Do chores, one after another, until nobody can ask any more."""
    requests, answers = _own_pipes()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    is_busy = threading.Event()
    threading.Thread(target=_read, args=(requests, inbox, is_busy), daemon=True).start()
    chores = Chores()
    while (chore := inbox.get()) is not None:
        is_busy.set()
        try:
            name, arguments = pickle.loads(chore)
            answer = {"answer": getattr(chores, name)(*arguments), "release": release()}
        except Exception as problem:  # a host that dies takes the reason with it
            answer = {"failed": f"{type(problem).__name__}: {problem}", "release": release()}
        pickle.dump(answer, answers)
        answers.flush()
        is_busy.clear()
    chores.close()


def _own_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take standard input and output for this process alone: what a subject prints must not mix with answers."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: IO[bytes], inbox: SimpleQueue[bytes | None], is_busy: threading.Event) -> None:
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            inbox.put(pickle.load(requests))
    if is_busy.is_set():  # the worker was killed, or the run interrupted: what is judged is for nobody
        leaving = multiprocessing.active_children()
        for process in leaving:
            process.terminate()  # one that keeps others takes them along
        for process in leaving:
            process.join(2)
            process.kill()
        os._exit(1)
    inbox.put(None)
