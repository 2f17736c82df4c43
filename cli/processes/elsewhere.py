"""Judging on the workers of a cluster: what `asking` does here, with the same face; see `hosting`."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veriformer.cli.processes.asking import Judges, Lost, Task
from veriformer.cli.processes.hosting import Question, done_there, leave
from veriformer.cli.processes.judged_store import release
from veriformer.cli.processes.printed import Printed
from veriformer.clusters.attempts import ATTEMPTS, Attempts, is_death
from veriformer.clusters.opening import Cluster, ClusterError

_JOB_SECONDS = 3000.0  # that the limits of what one job judges may add up to, so that a batch system's hour is enough
_SHARED = ("judge", "call")  # questions of which a job may hold several
_START_SECONDS = 600.0  # for processes to start on a slow disk


def minutes_of(seconds: float) -> int:
    """Return the minutes that a job may take whose single judgements may take these seconds."""
    return math.ceil((max(_JOB_SECONDS, seconds) + _START_SECONDS) / 60)


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        answer: of the host; None if there is none.
        why: there is none.
        beside: what a user should know who reads why a target was refused there.
    """

    answer: Any
    why: str
    beside: str = ""


class Elsewhere:
    """The workers of a cluster, for one run of a command.

    Args:
        cluster: with workers that see the same files.
        at_once: jobs handed over at a time; None: what the cluster finds worth while.
    """

    def __init__(self, cluster: Cluster, at_once: int | None = None) -> None:
        self._cluster, self._at_once = cluster, at_once
        self._run, self._folder = uuid.uuid4().hex, str(Path.cwd())
        self._jobs = Attempts[int](cluster)
        self._keys = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def width(self) -> int:
        """How many jobs are worth handing over at a time."""
        return self._at_once or self._cluster.width()

    def share(self, left: int, seconds: float) -> int:
        """Return how many of the judgements that are left, with these limits, make up the next job."""
        rounds = self._cluster.rounds
        return max(1, min(math.ceil(left / (rounds * self.width)), int(_JOB_SECONDS // seconds)))

    def begin(self, chore: str, *arguments: Any) -> int:
        """Hand over a job, a method of `Chores` with its arguments; return its key."""
        key = next(self._keys)
        self._jobs.begin(key, done_there, self._run, self._folder, pickle.dumps((chore, arguments)))
        return key

    def ended(self) -> Iterator[tuple[int, Ended]]:
        """Yield the jobs that have ended by now, by key.

        Raises:
            ClusterError: the workers cannot do such jobs at all.
        """
        for key, outcome in self._jobs.ended():
            yield key, self._opened(outcome)

    def cancel(self) -> None:
        """Take back what was not begun."""
        self._jobs.cancel()

    def leave(self) -> None:
        """End what is left of the run on the workers."""
        self.cancel()
        self._cluster.tell(leave, self._run)

    def _opened(self, outcome: Any) -> Ended:
        if isinstance(outcome, BaseException):
            if is_death(outcome):
                return Ended(None, f"the workers of the cluster that judged it died, {ATTEMPTS} times")
            line = (str(outcome).strip() or "no reason given").splitlines()[-1]
            raise ClusterError(
                f"a worker of the cluster cannot judge ({type(outcome).__name__}: {line}); "
                "install the same release of veriformer for all of them"
            )
        if "lost" in outcome:
            return Ended(None, outcome["lost"])
        machine, ours, theirs = outcome["machine"], _own_release(), outcome["release"]
        if other := [name for name in ours if theirs.get(name) != ours[name]]:
            told = ", ".join(f"{name} {theirs.get(name)} (here {ours[name]})" for name in other)
            raise ClusterError(f"a worker on {machine} has {told}; install the same versions on all machines")
        if "failed" in outcome:
            raise ClusterError(f"veriformer itself failed on {machine}: {outcome['failed']} (please report this)")
        beside = (
            "" if outcome["has_folder"] else f" (the worker on {machine} has no folder {self._folder}: share it, or "
            "install the package of the target there)"
        )  # fmt: skip
        return Ended(outcome["answer"], "", beside)


class PoolElsewhere(Judges):
    """Workers of a cluster that share tasks; as `asking.Pool`, but that each of them has processes for a subject."""

    def __init__(self, there: Elsewhere, settings: dict[str, Any], memory_gib: float) -> None:
        super().__init__()
        self._there, self._settings, self._memory_gib = there, settings, memory_gib

    def __exit__(self, *problem: object) -> None:
        self._there.cancel()

    def steps(self, tasks: Iterable[Task]) -> Iterator[None]:
        """Do all tasks, each once the tasks that it needs are finished; between two steps the caller may look.

        Raises:
            ClusterError: the workers cannot do them.
        """
        waiting, running = list(tasks), dict[int, list[Task]]()
        while waiting or running:
            while len(running) < self._there.width and (job := self._next(waiting)):
                asked = [(task, arguments) for task in job if (arguments := self._arguments_of(task)) is not None]
                if asked:
                    running[self._begin(asked)] = [task for task, _ in asked]
            for key, ended in self._there.ended():
                self._settle(running.pop(key), ended)
            yield

    def _begin(self, asked: Sequence[tuple[Task, dict[str, Any]]]) -> int:
        home = asked[0][0].home
        questions = [
            Question(task.question, arguments, task.seconds, task.doing, task.modules) for task, arguments in asked
        ]
        return self._there.begin("judge", self._settings, self._memory_gib, home, self.falls[home], questions)

    def _settle(self, job: Sequence[Task], ended: Ended) -> None:
        """Give the tasks of a job that has ended what came of them."""
        if ended.answer is None:
            for task in job:
                self._lose(task, Lost(ended.why))
            return
        self.falls[job[0].home] += ended.answer["falls"]
        for task, found in zip(job, ended.answer["found"], strict=True):
            task.told += Printed(**found["printed"])
            if (lost := found["lost"]) is not None:
                self._lose(task, Lost(**{**lost, "why": lost["why"] + ended.beside}))
                continue
            self._finish(task, found["answer"])

    def _next(self, waiting: list[Task]) -> list[Task]:
        """Take those tasks off the list that make up the next job: of one subject, whose models are built once."""
        ready = [task for task in waiting if all(n.finished for n in task.needs)]
        if not ready:
            return []
        first = ready[0]
        alike = [t for t in ready if (t.question, t.home, t.modules) == (first.question, first.home, first.modules)]
        size = self._there.share(len(ready), first.seconds) if first.question in _SHARED else 1
        job = alike[:size]
        for task in job:
            waiting.remove(task)
        return job


_own_release = functools.cache(release)
