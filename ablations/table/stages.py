"""Two stages: a few seeds of the whole sweep find the best and the worst setting of a row, fresh seeds report both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veriformer.ablations.execution.plan import Grouping, Job
from veriformer.ablations.table.design import Cell, Design, Point
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.trial import Trial
from veriformer.ablations.verdicts.rows import Records, loss_areas

Found = Mapping[str, Mapping[str, Any]]
"""Records of finished trials by key."""

STACK = 18
"""Models of a sweep that are trained together on a core; wider stacks of these gain nothing measurable."""

LEARNED = 0.95
"""Share of the way from chance to the best possible that every seed has to go for a setting to count as training."""


@dataclass(frozen=True)
class Tuned:
    """What the first stage says of a row.

    Attributes:
        best: the setting of the highest mean accuracy; of equals, the one of the smaller loss area.
        worst: the setting of the lowest; of equals, the one of the larger loss area.
        trains: for each setting of the sweep, whether every one of its seeds learned the task.
    """

    best: Point
    worst: Point
    trains: tuple[bool, ...]


@dataclass(frozen=True)
class Stages:
    """A design on one device: its jobs, and the trials behind every row.

    Attributes:
        design: what is compared.
        grouping: device and sizes of stacks.
    """

    design: Design
    grouping: Grouping

    def jobs(self, found: Found) -> list[Job]:
        """Return every job that can be named by what is found: the second stage of a row needs all of its first."""
        jobs: list[Job] = []
        for cell in self.design.cells():
            jobs += self.tuning(cell)
            tuned = self.tuned(cell, found)
            for point in dict.fromkeys((tuned.best, tuned.worst)) if tuned else ():
                jobs += self.reporting(cell, point)
            if cell.is_forced:
                jobs += self.everywhere(cell)
        return list({job.keys: job for job in jobs}.values())

    def find(self, get: Callable[[Iterable[str]], Found]) -> Found:
        """Return all records that are there, by what each stage lets the next one name."""
        found, known = get(key for job in self.jobs({}) for key in job.keys), -1
        while len(found) != known:
            known = len(found)
            found = get(key for job in self.jobs(found) for key in job.keys)
        return found

    def not_yet_named(self, found: Found) -> int:
        """Return how many trials at most belong to second stages that cannot be named yet."""
        waiting = [c for c in self.design.cells() if not c.is_forced and self.tuned(c, found) is None]
        return sum(2 * len(self.design.reporting_seeds(cell)) for cell in waiting)

    def tuning(self, cell: Cell) -> list[Job]:
        """Return the jobs of the first stage, seed by seed through the sweep; a row that is forced has none."""
        if cell.is_forced:
            return []
        return self._stacked(
            [self._trial(cell, p, s) for s in self.design.tuning_seeds() for p in self.design.points()]
        )

    def reporting(self, cell: Cell, point: Point) -> list[Job]:
        """Return the jobs of the second stage at one setting."""
        return self._stacked([self._trial(cell, point, seed) for seed in self.design.reporting_seeds(cell)])

    def everywhere(self, cell: Cell) -> list[Job]:
        """Return the jobs of a row that a theorem settles: its seeds go through the sweep, each at another setting."""
        points = self.design.points()
        return self._stacked(
            [self._trial(cell, points[i % len(points)], s) for i, s in enumerate(self.design.reporting_seeds(cell))]
        )

    def tuned(self, cell: Cell, found: Found) -> Tuned | None:
        """Return the best and the worst setting of a row; None while any trial of its sweep is missing."""
        trials = [(t, k) for job in self.tuning(cell) for t, k in zip(job.trials, job.keys, strict=True)]
        if not trials or any(key not in found for _, key in trials):
            return None
        by_point: dict[Point, list[Mapping[str, Any]]] = {}
        for trial, key in trials:
            by_point.setdefault(point_of(trial), []).append(found[key])
        return choose(by_point, cell.task)

    def records(self, jobs: Sequence[Job], found: Found) -> Iterator[tuple[Trial, Mapping[str, Any]]]:
        """Yield the trials of jobs that are finished, with their records."""
        for job in jobs:
            for trial, key in zip(job.trials, job.keys, strict=True):
                if key in found:
                    yield trial, found[key]

    def _trial(self, cell: Cell, point: Point, seed: int) -> Trial:
        return self.design.trial(cell, point, seed, self.grouping.device)

    def _stacked(self, trials: Sequence[Trial]) -> list[Job]:
        size = self.grouping.size(trials[0], STACK)
        return [Job(tuple(trials[i : i + size])) for i in range(0, len(trials), size)]


def point_of(trial: Trial) -> Point:
    """Return the setting of the sweep that a trial is at."""
    return Point(trial.recipe.learning_rate, trial.recipe.warm_up, trial.config["init"])


def learned(records: Records, task_name: str) -> bool:
    """Return whether every seed went 95 % of the way from chance to the best that is possible."""
    task = TASKS[task_name]
    return all(r["accuracy"] >= task.chance + LEARNED * (task.best - task.chance) for r in records)


def choose(by_point: Mapping[Point, Records], task_name: str) -> Tuned:
    """Return the best and the worst of settings by their records; of equals in all, the first of the sweep."""
    task = TASKS[task_name]

    def merit(point: Point) -> tuple[float, float]:
        records = by_point[point]
        accuracy = math.fsum(r["accuracy"] for r in records) / len(records)
        return accuracy, -math.fsum(loss_areas(records, task)) / len(records)

    return Tuned(
        max(by_point, key=merit), min(by_point, key=merit), tuple(learned(by_point[p], task_name) for p in by_point)
    )
