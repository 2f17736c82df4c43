"""Tasks for processes that judge: each in one that knows its own subject alone, replaced when it crashes or hangs.

See `worker` for one process, `answering` for its side of the conversation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from veriformer.cli.processes.limits import Limits
from veriformer.cli.processes.orphans import Orphans
from veriformer.cli.processes.printed import Printed
from veriformer.cli.processes.template import start, template
from veriformer.cli.processes.wire import NoAnswerError
from veriformer.cli.processes.worker import ANSWERING, Worker
from veriformer.properties.adapters.libraries import LIBRARIES

FALLS = 3
"""Tasks of one subject that may end or hang their process before the rest is not tried any more."""

NO_ANSWER = "the process sent what is no answer"

_LOOK = 0.1  # seconds between two looks at what the processes are doing
_FAREWELL = 3.0  # seconds for an idle process to end by itself


def warm_up(targets: Sequence[str] = ()) -> None:
    """Let the template import torch and the catalogue, while this process is still reading its arguments.

    Where whole libraries are judged it imports torch's compiler too: counters of FLOPs, checkpoints and optimisers ask
    for it, and each of the many copies would import it for itself, for a second.
    """
    many = any(target in LIBRARIES for target in targets)
    start(template(ANSWERING, *(("torch._dynamo",) if many else ())))


class RefusedError(Exception):
    """A worker refused a question; the message is one sentence for the user.

    Attributes:
        is_usage: whether the user asked for something that does not exist, rather than for something that broke.
    """

    def __init__(self, why: str, *, is_usage: bool = True) -> None:
        super().__init__(why)
        self.is_usage = is_usage


@dataclass(frozen=True)
class Lost:
    """Why there is no answer.

    Attributes:
        why: one sentence.
        outcome: of the row: "ERROR", "TIMEOUT", or "BLOCKED" if it was not asked any more.
        is_usage: whether the user asked for something that does not exist.
        fell: whether its process ended.
    """

    why: str
    outcome: str = "ERROR"
    is_usage: bool = False
    fell: bool = False


@dataclass(eq=False)
class Task:
    """One question.

    Attributes:
        question: method of `Answers`.
        arguments: gives its arguments when it is sent; None if there is nothing to ask after all.
        done: called with the answer; raises NoAnswerError for what has not the form of one, before it takes it up.
        lost: called if no answer comes.
        needs: tasks that must be done first.
        seconds: limit, of those that count.
        home: target whose process is asked; "" for one that knows no target.
        told: what its process printed is added there.
        doing: in words, for what becomes of it: "was judged".
        modules: None, or what a process of no target imports once, to answer each question by a copy of itself.
        finished: whether the answer came, or none will.
    """

    question: str
    arguments: Callable[[], dict[str, Any] | None]
    done: Callable[[dict[str, Any]], None]
    lost: Callable[[Lost], None]
    needs: list[Task] = field(default_factory=list)
    seconds: float = 60.0
    home: str = ""
    told: Printed = field(default_factory=Printed)
    doing: str = "the subject was judged"
    modules: tuple[str, ...] | None = None
    finished: bool = False


class Judges(ABC):
    """Whoever does tasks.

    Attributes:
        falls: tasks that ended or hung their process, by home.
    """

    def __init__(self) -> None:
        self.falls: Counter[str] = Counter()

    def __enter__(self) -> Judges:
        return self

    @abstractmethod
    def __exit__(self, *problem: object) -> None:
        """End what is left."""

    @abstractmethod
    def steps(self, tasks: Iterable[Task]) -> Iterator[None]:
        """Do all tasks, each once the tasks that it needs are finished; between two steps the caller may look."""

    def run(self, tasks: Iterable[Task]) -> None:
        """Do all tasks, each once the tasks that it needs are finished."""
        for _ in self.steps(tasks):
            pass

    def ask(self, question: str, seconds: float = 300.0, home: str = "", **arguments: Any) -> dict[str, Any]:
        """Ask one question and wait for the answer.

        Raises:
            RefusedError: no answer, with the reason.
        """
        given: list[dict[str, Any]] = []
        lost: list[Lost] = []
        self.run([Task(question, lambda: arguments, given.append, lost.append, seconds=seconds, home=home)])
        if lost:
            raise RefusedError(lost[0].why, is_usage=lost[0].is_usage)
        return given[0]

    def _arguments_of(self, task: Task) -> dict[str, Any] | None:
        """Return what to ask with; None where the task is lost, since it is not asked any more."""
        if self.falls[task.home] >= FALLS and task.home:
            self._lose(task, Lost(f"given up: its process ended or hung in {FALLS} rows before this one", "BLOCKED"))
            return None
        arguments = task.arguments()
        if arguments is None:
            self._lose(task, Lost("there was nothing to ask", "BLOCKED"))
        return arguments

    def _finish(self, task: Task, answer: dict[str, Any]) -> None:
        """Hand over an answer; what has the form of none, from a process of somebody's code, loses the task."""
        try:
            task.done(answer)
        except (NoAnswerError, KeyError, TypeError, AttributeError, ValueError):
            if not task.home:
                raise
            self.falls[task.home] += 1
            self._lose(task, Lost(f"{NO_ANSWER} while {task.doing}"))
        task.finished = True

    def _lose(self, task: Task, lost: Lost) -> None:
        task.lost(lost)
        task.finished = True


class Pool(Judges):
    """Several workers that share tasks.

    Args:
        size: workers at a time.
        settings: fields of `Settings`, dtypes as names.
        memory_gib: that a worker may fill on the CPU; 0 for no limit.
        adopts: whether this process ends what falls to it, see `Orphans`; False where others start children in it.
    """

    def __init__(self, size: int, settings: dict[str, Any], memory_gib: float, *, adopts: bool = True) -> None:
        super().__init__()
        self.size, self.settings, self.limits = size, settings, Limits(memory_gib)
        self._idle: list[Worker] = []
        self._busy: dict[Worker, Task] = {}
        self._leaving: dict[Worker, float] = {}
        self._orphans = Orphans() if adopts else None

    def __exit__(self, *problem: object) -> None:
        for worker in self._busy:
            worker.stop()
        for worker in self._idle[:]:
            self._dismiss(worker)
        while self._leaving:
            self._say_farewell()
            time.sleep(0.005)
        if self._orphans is not None:
            self._orphans.close()

    def steps(self, tasks: Iterable[Task]) -> Iterator[None]:
        """Do all tasks, each once the tasks that it needs are finished; between two steps the caller may look."""
        waiting = list(tasks)
        while waiting or self._busy:
            self._hand_out(waiting)
            self._collect()
            yield

    def _hand_out(self, waiting: list[Task]) -> None:
        while len(self._busy) < self.size:
            task = next((t for t in waiting if all(n.finished for n in t.needs)), None)
            if task is None:
                return
            waiting.remove(task)
            arguments = self._arguments_of(task)
            if arguments is None:
                continue
            worker = self._worker_of(task)
            try:
                worker.ask(task.question, task.seconds, **arguments)
            except OSError:  # it ended while nobody asked it anything
                self._discard(worker)
                worker = Worker(self.settings, self.limits, task.home, task.modules)
                worker.ask(task.question, task.seconds, **arguments)
            self._busy[worker] = task

    def _worker_of(self, task: Task) -> Worker:
        """Return an idle process of the task's home, or a new one; few of other homes are kept."""
        for worker in [w for w in self._idle if (w.home, w.modules) == (task.home, task.modules)]:
            self._idle.remove(worker)
            if worker.is_alive:
                return worker
            self._discard(worker)
        while len(self._idle) > self.size + 1:
            self._dismiss(next((w for w in self._idle if w.home), self._idle[0]))
        return Worker(self.settings, self.limits, task.home, task.modules)

    def _collect(self) -> None:
        self._say_farewell()
        if not self._busy:
            return
        wires = {w.wire.end: w for w in self._busy}
        outlets = {w.outlet.pipe: w for w in self._busy if w.outlet.is_open}
        ready = wait([*wires, *outlets], _LOOK)
        for pipe in [p for p in outlets if p in ready]:
            outlets[pipe].outlet.drain(outlets[pipe].printed)
        for end in [e for e in wires if e in ready]:
            self._hear(wires[end])
        for worker in list(self._busy):
            if why := worker.overdue():
                self._fall(worker, Lost(why, "TIMEOUT"))

    def _hear(self, worker: Worker) -> None:
        """Take the answer of a process, or note that none will come."""
        task = self._busy[worker]
        try:
            message = worker.take()
        except EOFError:
            self._fall(worker, Lost(f"{worker.epitaph()} while {task.doing}", fell=True))
            return
        except NoAnswerError:
            self._fall(worker, Lost(f"{NO_ANSWER} while {task.doing}"))
            return
        if message is None:
            return
        del self._busy[worker]
        task.told += worker.printed
        worker.printed = Printed()
        self.falls[worker.home] += worker.has_fallen
        self._release(worker)
        verdict, answer = message
        if verdict == "ok":
            self._finish(task, answer)
        else:
            self._lose(task, Lost(str(answer.get("why")), is_usage=bool(answer.get("is_usage", True))))

    def _fall(self, worker: Worker, lost: Lost) -> None:
        """Note that a task ended or hung its process."""
        task = self._busy.pop(worker)
        worker.stop()
        if self._orphans is not None:
            self._orphans.end()
        task.told += worker.printed
        self.falls[worker.home] += 1
        words = worker.printed.last_words
        self._lose(task, replace(lost, why=f"{lost.why}; its last words: {words}") if words else lost)

    def _release(self, worker: Worker) -> None:
        """Keep a worker for what comes next, or let another take its place."""
        if worker.is_spent:
            worker.stop()
        else:
            self._idle.append(worker)

    def _discard(self, worker: Worker) -> None:
        """End a process that ended already, and what it left behind."""
        worker.stop()

    def _dismiss(self, worker: Worker) -> None:
        self._idle.remove(worker)
        worker.release()
        self._leaving[worker] = time.monotonic() + _FAREWELL

    def _say_farewell(self) -> None:
        """End what does not end by itself."""
        for worker, until in list(self._leaving.items()):
            worker.outlet.drain(Printed())
            if not worker.is_alive or time.monotonic() > until:
                del self._leaving[worker]
                worker.stop()
