"""One run: plan, what is stored already, what is left, and the record at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from veriformer.ablations.execution.executors import run_jobs
from veriformer.ablations.execution.plan import Grouping, Job, jobs_of
from veriformer.ablations.execution.store import Store
from veriformer.ablations.measuring.measurement import Measurement
from veriformer.ablations.studies.study import Study
from veriformer.ablations.training.records import is_whole
from veriformer.ablations.trials.trial import code_digest
from veriformer.ablations.verdicts.summary import FORMAT, summarise, versions
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
    """

    studies: Sequence[Study]
    measurements: Sequence[Measurement]
    seeds: int
    grouping: Grouping
    store: Store
    failures: dict[str, int] = field(default_factory=dict)
    device_name: str = ""

    def __post_init__(self) -> None:
        self.jobs = jobs_of(self.studies, self.seeds, self.grouping)
        stored = self._stored()
        self.left = [job for job in self.jobs if any(key not in stored for key in job.keys)]
        self.device_name = self.device_name or device_name(self.grouping.device)

    @property
    def trials(self) -> int:
        """How many there are in all."""
        return sum(len(job.trials) for job in self.jobs)

    def _stored(self) -> dict[str, dict[str, Any]]:
        found = self.store.get(key for job in self.jobs for key in job.keys)
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
        for job, outcome in run_jobs(executor, self.left, ahead=ahead):
            if isinstance(outcome, BaseException):
                reason = (
                    f"{type(outcome).__name__}: {str(outcome).splitlines()[0] if str(outcome) else 'no reason given'}"
                )
                self.failures[reason] = self.failures.get(reason, 0) + len(job.trials)
                yield job, False
                continue
            _same_code(outcome)
            if job.trials[0].device != "cpu":
                self.device_name = outcome["where"]
            records = outcome["records"]
            self.store.add(
                (key, trial.to_json(), record) for key, trial, record in zip(job.keys, job.trials, records, strict=True)
            )
            yield job, True

    def record(self, command: str, measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Return what reports are made of, from what is stored by now."""
        found = self._stored()
        try:
            told = [summarise(study, self.seeds, self.grouping, found) for study in self.studies]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as problem:
            why = f"its trials cannot be tabled ({type(problem).__name__}: {problem})"
            raise self.store.damaged(why) from problem
        told += [_measured(m, measured[m.name]) for m in self.measurements if m.name in measured]
        table = sinusoidal(torch.arange(48), 64) if any(s.name == "positions" for s in self.studies) else None
        return {
            "format": FORMAT,
            "command": command,
            "date": datetime.now(UTC).date().isoformat(),
            "seeds": self.seeds,
            "device": self.grouping.device,
            "device_name": self.device_name,
            "versions": versions(),
            "code": code_digest(),
            "trials": {"finished": len(found), "missing": self.trials - len(found), "failures": dict(self.failures)},
            "sinusoidal": None if table is None else [[round(float(v), 3) for v in row] for row in table],
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
