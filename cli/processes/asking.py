"""Processes that are asked: one thing at a time, replaced when they crash or hang; see `answering` for their side."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from veriformer.cli.processes.template import start, template

_START = 120.0  # seconds for a process to import torch on a slow disk


_ANSWERING = "veriformer.cli.processes.answering"


def warm_up() -> None:
    """Let the template import torch and the catalogue, while this process is still reading its arguments."""
    start(template(_ANSWERING))


def _begin(*arguments: Any) -> None:
    from veriformer.cli.processes.answering import serve  # imports torch, which the asking side never does

    serve(*arguments)


class RefusedError(Exception):
    """A worker refused a question; the message is one sentence for the user.

    Attributes:
        is_usage: whether the user asked for something that does not exist, rather than for something that broke.
    """

    def __init__(self, why: str, *, is_usage: bool = True) -> None:
        super().__init__(why)
        self.is_usage = is_usage


class Worker:
    """One process that judges."""

    def __init__(self, settings: dict[str, Any], memory_gib: float) -> None:
        context = template(_ANSWERING)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(theirs, settings, memory_gib), daemon=True)
        self.process.start()
        theirs.close()
        self.deadline = 0.0
        self.is_new = True
        self.is_spent = False

    def ask(self, question: str, seconds: float, **arguments: Any) -> None:
        """Send a question that must be answered in time."""
        self.deadline = time.monotonic() + seconds + (_START if self.is_new else 0)
        self.is_new = False
        self.connection.send((question, arguments))

    def answer(self) -> dict[str, Any]:
        """Receive the answer.

        Raises:
            RefusedError: the worker says why not.
            EOFError: the process is gone.
        """
        verdict, answer, self.is_spent = self.connection.recv()
        if verdict == "refused":
            raise RefusedError(answer["why"], is_usage=answer.get("is_usage", True))
        return answer

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def retire(self) -> None:
        """Let an idle process end by itself, so that it leaves nothing behind; end it if it does not."""
        self.connection.close()
        self.process.join(3)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def epitaph(self) -> str:
        """Say how the process ended."""
        self.process.join(5)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with status {code}"


@dataclass
class Task:
    """One question for any worker.

    Attributes:
        question: method of `Answers`.
        arguments: gives its arguments when it is sent.
        needs: tasks that must be done first.
        done: called with the answer.
        lost: called with a sentence, and whether time was up, if no answer comes.
    """

    question: str
    arguments: Callable[[], dict[str, Any]]
    done: Callable[[dict[str, Any]], None]
    lost: Callable[[str, bool], None]
    needs: list[Task] = field(default_factory=list)
    seconds: float = 60.0
    finished: bool = False


class Pool:
    """Several workers that share tasks."""

    def __init__(self, size: int, settings: dict[str, Any], memory_gib: float) -> None:
        self.size, self.settings, self.memory_gib = size, settings, memory_gib
        self._idle: list[Worker] = []
        self._busy: dict[Worker, Task] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *problem: object) -> None:
        for worker in self._busy:
            worker.stop()
        for worker in self._idle:
            worker.retire()

    def ask(self, question: str, seconds: float = 300.0, **arguments: Any) -> dict[str, Any]:
        """Ask one question and wait for the answer.

        Raises:
            RefusedError: no answer, with the reason.
        """
        worker = self._idle.pop() if self._idle else Worker(self.settings, self.memory_gib)
        worker.ask(question, seconds, **arguments)
        if not worker.connection.poll(worker.deadline - time.monotonic()):
            worker.stop()
            raise RefusedError(f"no answer came within {seconds:g} s: importing the target hangs", is_usage=False)
        try:
            answer = worker.answer()
        except EOFError:
            raise RefusedError(f"{worker.epitaph()} while the target was loaded", is_usage=False) from None
        self._release(worker)
        return answer

    def _release(self, worker: Worker) -> None:
        """Keep a worker for what comes next, or let another take its place."""
        if worker.is_spent:
            worker.stop()
        else:
            self._idle.append(worker)

    def run(self, tasks: Iterable[Task]) -> None:
        """Do all tasks, each once the tasks that it needs are finished."""
        waiting = list(tasks)
        while waiting or self._busy:
            self._hand_out(waiting)
            self._collect()

    def _hand_out(self, waiting: list[Task]) -> None:
        while len(self._busy) < self.size:
            task = next((t for t in waiting if all(n.finished for n in t.needs)), None)
            if task is None:
                return
            waiting.remove(task)
            worker = self._idle.pop() if self._idle else Worker(self.settings, self.memory_gib)
            worker.ask(task.question, task.seconds, **task.arguments())
            self._busy[worker] = task

    def _collect(self) -> None:
        soonest = min(w.deadline for w in self._busy)
        ready = wait([w.connection for w in self._busy], max(0.0, soonest - time.monotonic()))
        for worker in [w for w in self._busy if w.connection in ready]:
            task = self._busy.pop(worker)
            try:
                task.done(worker.answer())
                self._release(worker)
            except RefusedError as problem:
                self._release(worker)
                task.lost(str(problem), False)
            except (EOFError, ConnectionResetError):
                task.lost(f"{worker.epitaph()} while the subject was judged", False)
            task.finished = True
        for worker in [w for w in self._busy if time.monotonic() > w.deadline]:
            task = self._busy.pop(worker)
            worker.stop()
            task.lost(f"the subject did not come back within {task.seconds:g} s and was stopped", True)
            task.finished = True
