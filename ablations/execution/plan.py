"""From studies to jobs: which trials are wanted, which are trained together, which are there already."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from veriformer.ablations.execution.memory import fitting_width
from veriformer.ablations.studies.study import Setting, Study, Variant
from veriformer.ablations.trials.trial import Trial

WIDTH = {"cpu": 12, "cuda": 64}
"""Seeds trained together unless memory asks for fewer. On a core, wider stacks of these models gain little more."""


@dataclass(frozen=True)
class Job:
    """The seeds of one trial that are trained together; the unit that a worker does and that a kill can cost.

    Attributes:
        trials: the same but for the seed.
    """

    trials: tuple[Trial, ...]

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """The key of each trial."""
        group = tuple(t.seed for t in self.trials)
        return tuple(t.key(group) for t in self.trials)

    @property
    def cost(self) -> float:
        """A number that grows with the time it takes, so that the longest are begun first."""
        trial = self.trials[0]
        layers, width = trial.config.get("num_layers", 2), trial.config.get("d_model", 32)
        return float(len(self.trials) * trial.recipe.steps * trial.recipe.batch_size * layers * width)


@dataclass(frozen=True)
class Grouping:
    """How many seeds are trained together.

    Attributes:
        device: "cpu" or "cuda".
        max_memory: bytes that one stack may take; None: no limit.
        width: seeds of a stack at most; None: the device's usual.
    """

    device: str = "cpu"
    max_memory: float | None = None
    width: int | None = None

    def jobs(self, study: Study, task: str, setting: Setting, variant: Variant, seeds: int) -> list[Job]:
        """Return the jobs of one row of a study, seeds 0, ..., `seeds` - 1 in order."""
        trials = [study.trial(task, setting, variant, seed, self.device) for seed in range(seeds)]
        size = self.width or WIDTH.get(self.device, 12)
        if self.max_memory is not None:
            size = min(size, fitting_width(trials[0], self.max_memory))
        return [Job(tuple(trials[i : i + size])) for i in range(0, len(trials), size)]


def jobs_of(studies: Sequence[Study], seeds: int, grouping: Grouping) -> list[Job]:
    """Return every job of the studies once, the longest first."""
    jobs = {
        job.keys: job
        for study in studies
        for task, setting, variant in study.rows()
        for job in grouping.jobs(study, task, setting, variant, seeds)
    }
    return sorted(jobs.values(), key=lambda job: -job.cost)
