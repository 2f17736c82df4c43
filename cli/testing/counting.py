"""The last lines of a run of pytest: what became of every subject, told as `veriformer check` tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from veriformer.cli.testing.rows import CANARIES, FOUND, POWER
from veriformer.reports.terminal import summary, totals


class Counts:
    """What the reports of tests carry, of all workers together."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._outcomes: dict[str, dict[str, str]] = {}
        self._faults: dict[str, dict[str, bool]] = {}
        self._canaries: dict[str, list[Any]] = {}

    def take(self, report: pytest.TestReport) -> None:
        """Take up one report."""
        carried: list[tuple[str, Any]] = [*report.user_properties]
        for name, found in carried:
            if name == FOUND:
                target, told, outcome = found
                self._names[target] = told
                self._outcomes.setdefault(target, {})[report.nodeid] = outcome
            elif name == POWER:
                target, faults = found
                for fault, noticed_by in faults:
                    noticed = self._faults.setdefault(target, {})
                    noticed[fault] = noticed.get(fault, False) or noticed_by is not None
            elif name == CANARIES:
                kind, *counts = found
                self._canaries[kind] = min(counts, self._canaries.get(kind, counts))  # of the worker that missed most

    def lines(self, *, profile: str, seed: int, device: str, catalogue: int) -> Iterator[str]:
        """Yield the lines; none where no row has run.

        Args:
            profile: of the run.
            seed: of the run.
            device: of the run.
            catalogue: number of properties there are.
        """
        if not (self._outcomes or self._canaries):
            return
        subjects: list[dict[str, Any]] = []
        for target, outcomes in self._outcomes.items():
            subjects.append(
                subject := {"name": self._names[target], "results": [{"outcome": o} for o in outcomes.values()]}
            )
            faults = self._faults.get(target, {})
            power = f", power {sum(faults.values())}/{len(faults)}" if faults else ""
            yield f"{subject['name']}  {summary(subject, catalogue)}{power}"
            for fault in (name for name, noticed in faults.items() if not noticed):
                yield f"    unnoticed when put into this subject: {fault}"
        caught, sent = (sum(found[place] for found in self._canaries.values()) for place in (0, 1))
        for missed in (told for found in self._canaries.values() for told in found[2]):
            yield f"VOID: {missed}"
        canaries = {"sent": sent, "caught": caught}
        record = {"subjects": subjects, "canaries": canaries, "profile": profile, "seed": seed, "device": device}
        yield totals(record)
