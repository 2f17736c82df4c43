"""Evidence from trained models: small Transformers with one thing changed, every seed a sample."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
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
from veriformer.ablations.verdicts.rows import DEAD_ERRORS
from veriformer.claims.numbers import mean_interval

FIRST_SEED, SEEDS = 8000, 12
"""Seeds of what is reported. No study of the ablations uses them, and no limit was set after a look at them."""

QUICK_FIRST_SEED, QUICK_SEEDS = 7000, 5
"""Seeds of `--quick`, which are others: what is tried out while a claim is written is tried on them."""

TUNING = range(QUICK_FIRST_SEED, QUICK_FIRST_SEED + QUICK_SEEDS)
"""Seeds on which a claim may choose a learning rate; nothing is reported of them."""

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


def trained(study: Study, *, seeds: range, folder: Path | None) -> dict[tuple[str, str, str], Row]:
    """Train what is not stored yet of a study; return its rows by (task, setting, variant).

    Args:
        study: whose rows are wanted.
        seeds: of every row.
        folder: of the store; None: nothing is kept.

    Raises:
        RuntimeError: a job failed; the message says why.
    """
    with contextlib.ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(Store(where / "trials.sqlite"))
        rows = {
            (task, setting.name, variant.name): [
                Job(tuple(study.trial(task, setting, variant, s) for s in seeds[i : i + WIDTH["cpu"]]))
                for i in range(0, len(seeds), WIDTH["cpu"])
            ]
            for task, setting, variant in study.rows()
        }
        jobs = [job for row in rows.values() for job in row]
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
        return {name: Row(name[0], [stored[k] for job in row for k in job.keys]) for name, row in rows.items()}
