"""Evidence from trained models: small Transformers with one thing changed, every seed a sample."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from veriformer.ablations.execution.executors import local, run_jobs
from veriformer.ablations.execution.plan import WIDTH, Job
from veriformer.ablations.execution.store import Store
from veriformer.ablations.studies.study import Study
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.training.samples import HELD_OUT
from veriformer.ablations.trials.trial import Trial
from veriformer.ablations.verdicts.rows import DEAD_ERRORS
from veriformer.claims.numbers import mean_interval

FIRST_SEED, SEEDS = 8000, 12
"""Seeds of what is reported. No study of the ablations uses them, and no limit was set after a look at them."""

QUICK_FIRST_SEED, QUICK_SEEDS = 7000, 5
"""Seeds of `--quick`, which are others: what is tried out while a claim is written is tried on them."""

TUNING = range(QUICK_FIRST_SEED, QUICK_FIRST_SEED + QUICK_SEEDS)
"""Seeds on which a claim may choose a learning rate; nothing is reported of them."""

WIDE = 20
"""Models of a quick run that are trained together: a step of so many costs less than twice one of five."""

Name = tuple[str, str, str]
"""Of a row: task, setting, variant."""

Records = list[dict[str, Any]]


def seeds_of(quick: bool, number: int = SEEDS, few: int = QUICK_SEEDS, first: int | None = None) -> range:
    """Return the seeds that every statistical claim is tested on.

    Args:
        quick: whether few are asked for.
        number: of a thorough test.
        few: of a quick one.
        first: of them, where a test is repeated on others than the usual.
    """
    usual, count = (QUICK_FIRST_SEED, few) if quick else (FIRST_SEED, number)
    start = usual if first is None else first
    return range(start, start + count)


@dataclass(frozen=True)
class Row:
    """The seeds of one variant on one task.

    Attributes:
        task: its name.
        records: one a seed, in the order of the seeds.
    """

    task: str
    records: Records

    def values(self, read: Callable[[dict[str, Any]], float]) -> torch.Tensor:
        """Return one number a seed."""
        return torch.tensor([float(read(r)) for r in self.records], dtype=torch.float64)

    @property
    def accuracy(self) -> torch.Tensor:
        """Held-out accuracy of each seed."""
        return self.values(lambda r: r["accuracy"])

    def dead(self) -> tuple[float, float]:
        """Return the exact 95 % interval (Clopper & Pearson 1934) of the share of seeds that end at chance."""
        chance = TASKS[self.task].chance
        band = DEAD_ERRORS * (chance * (1 - chance) / HELD_OUT) ** 0.5
        return share(int((self.accuracy <= chance + band).sum()), len(self.records))


def share(count: int, of: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a probability of which `count` in `of` were seen."""
    found = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def apart(
    one: Row, other: Row, read: Callable[[dict[str, Any]], float] = lambda r: r["accuracy"]
) -> tuple[float, float]:
    """Return the 95 % interval of the mean difference of two rows, seed by seed; the one less the other."""
    return mean_interval(one.values(read) - other.values(read))


def planned(study: Study, seeds: range, *, together: bool = False) -> tuple[list[Job], dict[Name, list[str]]]:
    """Return the jobs of a study, and the keys of the trials of each row.

    Args:
        study: whose rows are wanted.
        seeds: of every row.
        together: whether rows are stacked that differ in rate, warm-up and initial weights alone, besides the seeds.
    """
    stacks: dict[str, list[tuple[Name, Trial]]] = {}
    for task, setting, variant in study.rows():
        name = (task, setting.name, variant.name)
        for seed in seeds:
            trial = study.trial(task, setting, variant, seed)
            stacks.setdefault(_alike(trial) if together else repr(name), []).append((name, trial))
    width, jobs, rows = WIDE if together else WIDTH["cpu"], list[Job](), dict[Name, list[str]]()
    for stack in stacks.values():
        for part in (stack[i : i + width] for i in range(0, len(stack), width)):
            jobs.append(Job(tuple(trial for _, trial in part)))
            for (name, _), key in zip(part, jobs[-1].keys, strict=True):
                rows.setdefault(name, []).append(key)
    return jobs, rows


def _alike(trial: Trial) -> str:
    """Return a word that trials share which can be one stack."""
    config = {name: value for name, value in trial.config.items() if name != "init"}
    return replace(trial, seed=0, config=config, recipe=replace(trial.recipe, learning_rate=1.0, warm_up=0)).key(())


def trained(study: Study, *, seeds: range, folder: Path | None, together: bool = False) -> dict[Name, Row]:
    """Train what is not stored yet of a study; return its rows by (task, setting, variant).

    Args:
        study: whose rows are wanted.
        seeds: of every row.
        folder: of the store; None: nothing is kept.
        together: whether rows are stacked where they can be.

    Raises:
        RuntimeError: a job failed; the message says why.
    """
    with contextlib.ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(Store(where / "trials.sqlite"))
        jobs, rows = planned(study, seeds, together=together)
        stored = store.get(k for job in jobs for k in job.keys)
        left = sorted((j for j in jobs if any(k not in stored for k in j.keys)), key=lambda j: -j.cost)
        if left:
            processes = min(os.cpu_count() or 1, len(left))
            with local(processes) as executor:
                for job, outcome in run_jobs(executor, left, ahead=2 * processes):
                    if isinstance(outcome, BaseException):
                        raise RuntimeError(f"training failed: {type(outcome).__name__}: {outcome}") from outcome
                    store.add(
                        (k, t.to_json(), r) for k, t, r in zip(job.keys, job.trials, outcome["records"], strict=True)
                    )
            stored = store.get(k for job in jobs for k in job.keys)
        return {name: Row(name[0], [stored[k] for k in keys]) for name, keys in rows.items()}
