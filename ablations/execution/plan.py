"""From studies to jobs: which trials are wanted, which are trained together, which are there already."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from veriformer.ablations.execution.memory import fitting_width
from veriformer.ablations.studies.study import Setting, Study, Variant
from veriformer.ablations.training.own.stackability import why_apart
from veriformer.ablations.trials.own_process import asked_apart
from veriformer.ablations.trials.trial import Trial

WIDTH = {"cpu": 12, "cuda": 64}
"""Seeds trained together unless memory asks for fewer. On a core, wider stacks of these models gain little more."""


@dataclass(frozen=True)
class Job:
    """Trials that are trained together; the unit that a worker does and that a kill can cost.

    Attributes:
        trials: the same but for the seed, and in a sweep for learning rate, warm-up and scheme of the initial weights.
    """

    trials: tuple[Trial, ...]

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """The key of each trial."""
        group = tuple(t.seed for t in self.trials)
        alike = all(replace(t, seed=self.trials[0].seed) == self.trials[0] for t in self.trials)
        others = () if alike else tuple(t.key(group) for t in self.trials)
        return tuple(t.key(group, others) for t in self.trials)

    @property
    def cost(self) -> float:
        """A number that grows with the time it takes, so that the longest are begun first."""
        trial = self.trials[0]
        layers, width = trial.config.get("num_layers", 2), trial.config.get("d_model", 32)
        return float(len(self.trials) * trial.recipe.steps * trial.recipe.batch_size * layers * width)


FIRST_SEED = 2000
"""Of a run, unless it says otherwise. Seeds below it are for tuning: no published number may come from one of them."""


@dataclass(frozen=True)
class Grouping:
    """Which seeds are trained, and how many of them together.

    Attributes:
        device: "cpu" or "cuda".
        max_memory: bytes that one stack may take; None: no limit.
        width: seeds of a stack at most; None: the device's usual.
        first_seed: of every row; the others follow it.
    """

    device: str = "cpu"
    max_memory: float | None = None
    width: int | None = None
    first_seed: int = FIRST_SEED

    def jobs(self, study: Study, task: str, setting: Setting, variant: Variant, seeds: int) -> list[Job]:
        """Return the jobs of one row of a study, `seeds` of them in order from the first on."""
        numbers = range(self.first_seed, self.first_seed + seeds)
        trials = [study.trial(task, setting, variant, seed, self.device) for seed in numbers]
        if trials[0].own is None:
            size = self.size(trials[0], WIDTH["cpu"])
        elif apart(replace(trials[0], seed=0, device="cpu")):  # a job each: as many processes as there are can help
            trials, size = [replace(trial, stacked=False) for trial in trials], 1
        else:
            size = self.width or WIDTH.get(self.device, WIDTH["cpu"])
        return [Job(tuple(trials[i : i + size])) for i in range(0, len(trials), size)]

    def size(self, trial: Trial, on_a_core: int) -> int:
        """Return how many trials like this one are trained together: as asked, else the device's usual; if they fit."""
        usual = on_a_core if self.device == "cpu" else WIDTH.get(self.device, on_a_core)
        size = self.width or usual
        return size if self.max_memory is None else min(size, fitting_width(trial, self.max_memory))


_APART: dict[str, str] = {}


def apart(trial: Trial) -> str:
    """Return why the seeds of an own trial are trained one by one, or ""; it is tried out once a process."""
    key = trial.key(())
    if key not in _APART:
        _APART[key] = asked_apart(lambda: why_apart(trial), "its code ended the process that tried it")
    return _APART[key]


def jobs_of(studies: Sequence[Study], seeds: int, grouping: Grouping) -> list[Job]:
    """Return every job of the studies once, the longest first."""
    jobs = {
        job.keys: job
        for study in studies
        for task, setting, variant in study.rows()
        for job in grouping.jobs(study, task, setting, variant, seeds)
    }
    return sorted(jobs.values(), key=lambda job: -job.cost)
