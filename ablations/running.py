"""One run: plan, what is stored already, what is left, and the record at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from veriformer.ablations.execution.executors import run_jobs
from veriformer.ablations.execution.plan import Grouping, Job, jobs_of
from veriformer.ablations.execution.store import Store
from veriformer.ablations.execution.work import train_job
from veriformer.ablations.measuring.measurement import Measurement
from veriformer.ablations.studies.study import Study
from veriformer.ablations.table.design import Design
from veriformer.ablations.table.stages import Stages
from veriformer.ablations.table.telling import tell
from veriformer.ablations.training.own.blame import OwnCodeError, named
from veriformer.ablations.training.records import is_whole
from veriformer.ablations.trials.trial import code_digest
from veriformer.ablations.verdicts.machine import machine
from veriformer.ablations.verdicts.summary import FORMAT, commit, summarise, versions
from veriformer.clusters.attempts import Executor
from veriformer.reference.positions import sinusoidal


class MismatchError(Exception):
    """A worker runs other code than this process; its results would be filed under the wrong key."""


@dataclass
class Run:
    """Studies on their way to a record.

    Attributes:
        studies: that train.
        measurements: that measure.
        seeds: trained for every row.
        grouping: device and stacks.
        store: of finished trials.
        failures: what kept a job from ending, by its reason.
        design: of the table, where it is wanted.
        work: what a worker does with the trials of a job.
        faults: what somebody's own code raised, by the reason: the seeds, and the last lines that led there.
    """

    studies: Sequence[Study]
    measurements: Sequence[Measurement]
    seeds: int
    grouping: Grouping
    store: Store
    failures: dict[str, int] = field(default_factory=dict)
    device_name: str = ""
    design: Design | None = None
    work: Callable[..., dict[str, Any]] = train_job
    faults: dict[str, tuple[list[int], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = None if self.design is None else Stages(self.design, self.grouping)
        self._of_studies = jobs_of(self.studies, self.seeds, self.grouping)
        self._begun: set[tuple[str, ...]] = set()
        self._plan()
        self.device_name = self.device_name or device_name(self.grouping.device)

    def _plan(self) -> None:
        """Name the jobs, and those that are left; the table's second stage is named by what its first has stored."""
        self.jobs, self._unnamed = self._of_studies, 0
        if self.stages is not None:
            found = self.stages.find(self._get)
            self.jobs = [*self.stages.jobs(found), *self._of_studies]
            self._unnamed = self.stages.not_yet_named(found)
        stored = self._stored()
        missing = [job for job in self.jobs if any(key not in stored for key in job.keys)]
        self.left = sorted((job for job in missing if job.keys not in self._begun), key=lambda job: -job.cost)

    @property
    def trials(self) -> int:
        """How many there are in all; those of a second stage that cannot be named yet are counted at their most."""
        return sum(len(job.trials) for job in self.jobs) + self._unnamed

    @property
    def done(self) -> int:
        """How many were there already when the run was planned."""
        return sum(len(job.trials) for job in self.jobs) - sum(len(job.trials) for job in self.left)

    def _stored(self) -> dict[str, dict[str, Any]]:
        return self._get(key for job in self.jobs for key in job.keys)

    def _get(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        found = self.store.get(keys)
        for key, record in found.items():
            if not is_whole(record):
                raise self.store.damaged(f"the record of trial {key} is not what training gives")
        return found

    def advance(self, executor: Executor, ahead: int) -> Iterator[tuple[Job, bool]]:
        """Train what is left; yield each job with whether it ended well, once it is on disk.

        Raises:
            MismatchError: a worker runs other code.
            StoreError: the results cannot be stored.
        """
        while self.left:
            self._begun |= {job.keys for job in self.left}
            yield from self._train(executor, ahead)
            self._plan()

    def _train(self, executor: Executor, ahead: int) -> Iterator[tuple[Job, bool]]:
        for job, outcome in run_jobs(executor, self.left, ahead=ahead, work=self.work):
            if isinstance(outcome, BaseException):
                self._failed(job, outcome)
                yield job, False
                continue
            _same_code(outcome)
            if job.trials[0].device != "cpu":
                self.device_name = outcome["where"]
            ended = list(zip(job.keys, job.trials, outcome["records"], strict=True))
            whole = [(key, trial.to_json(), record) for key, trial, record in ended if isinstance(record, dict)]
            self.store.add(whole)
            for _, _, problem in ended:
                if isinstance(problem, OwnCodeError):
                    self._blame(problem)
            yield job, len(whole) == len(ended)

    def _failed(self, job: Job, problem: BaseException) -> None:
        """Take note of what kept a job from ending."""
        if isinstance(problem, OwnCodeError):
            self._blame(problem)
            return
        reason = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else 'no reason given'}"
        if job.trials[0].own is not None:  # whose code may have ended the process
            reason = f"{named(job.trials[0])}: {reason}"
        self.failures[reason] = self.failures.get(reason, 0) + len(job.trials)

    def _blame(self, problem: OwnCodeError) -> None:
        """Take note of what somebody's own code raised for one seed."""
        self.failures[problem.told] = self.failures.get(problem.told, 0) + 1
        self.faults.setdefault(problem.told, ([], problem.frames))[0].append(problem.seed)

    def record(self, command: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Return what reports are made of, from what is stored by now."""
        found = self._stored()
        try:
            told = summarise(self.studies, self.seeds, self.grouping, found)
            table_of_parts = None if self.stages is None else tell(self.stages, self._get)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as problem:
            why = f"its trials cannot be tabled ({type(problem).__name__}: {problem})"
            raise self.store.damaged(why) from problem
        told += [_measured(m, measured[m.name]) for m in self.measurements if m.name in measured]
        table = sinusoidal(torch.arange(48), 64) if any(s.name == "positions" for s in self.studies) else None
        return {
            "format": FORMAT,
            "command": command,
            "date": datetime.now(UTC).date().isoformat(),
            "seeds": self.seeds if self.studies or self.design is None else self.design.seeds,
            "first_seed": self.grouping.first_seed,
            "device": self.grouping.device,
            "device_name": self.device_name,
            "versions": versions(),
            "machine": machine(),
            "code": code_digest(),
            "commit": commit(),
            "trials": {"finished": len(found), "missing": self.trials - len(found), "failures": dict(self.failures)},
            "sinusoidal": None if table is None else [[round(float(v), 3) for v in row] for row in table],
            "table": table_of_parts,
            "studies": told,
        }


def _same_code(outcome: dict[str, Any]) -> None:
    if outcome["code"] != code_digest() or outcome["torch"] != torch.__version__:
        raise MismatchError(
            f"a worker runs torch {outcome['torch']} and code {outcome['code'][:8]}, "
            f"this process torch {torch.__version__} and code {code_digest()[:8]}; "
            "install the same versions on all machines"
        )


def _measured(measurement: Measurement, points: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": measurement.name,
        "question": measurement.question,
        "source": measurement.source,
        "variants": [],
        "tasks": [],
        "tests": 0,
        "warnings": [],
        "missing": 0,
        "noise": [],
        "rows": [],
        "points": points,
        "fit": measurement.conclude(points),
    }


def device_name(device: str) -> str:
    """Return what a device is called in reports."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device
