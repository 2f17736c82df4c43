"""The tests: a subject, and below it a row for each property that applies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from veriformer.cli.testing.judging import Judging
from veriformer.properties.pytest_plugin import conclude
from veriformer.properties.results.records import DEVIATION, LOADS, NOT_APPLICABLE, OPEN, PASS, Result

FOUND, CANARIES, POWER = "veriformer", "veriformer-canaries", "veriformer-power"
"""What the reports of tests carry, so that all workers are counted."""


class Subject(pytest.Collector):
    """One subject."""

    def __init__(self, *, target: str, judging: Judging, rows: Mapping[str, str], **given: Any) -> None:
        super().__init__(**given)
        self.target, self.judging = target, judging
        self.last: pytest.Item | None = None
        self._rows = rows

    def collect(self) -> list[pytest.Item]:
        """Return its rows, of which the level is known by the property."""
        return [Row.from_parent(self, name=prop, level=level) for prop, level in self._rows.items()]

    def teardown(self) -> None:
        """Put faults into it, once its last row has run."""
        if self.last is not None:
            self.judging.prove(self.target)
            if faults := self.judging.faults.get(self.target):
                self.last.user_properties.append((POWER, [self.target, faults]))


class Row(pytest.Item):
    """One property of one subject."""

    def __init__(self, *, level: str, **given: Any) -> None:
        super().__init__(**given)
        for mark in (level, self.name.partition(".")[0]):
            self.add_marker(mark)

    @property
    def subject(self) -> Subject:
        """The node above."""
        assert isinstance(self.parent, Subject)
        return self.parent

    def runtest(self) -> None:
        """Judge it."""
        subject, judging = self.subject, self.subject.judging
        subject.last = None  # an interrupted row is the last of all
        part = judging.parts[subject.target]
        if self.name != LOADS:
            self._send_canaries(part.kind)
        before = judging.printed(subject.target)
        result = judging.judged(subject.target, self.name)
        subject.last = self
        self.user_properties.append((FOUND, [subject.target, part.name, result.outcome]))
        if printed := judging.printed_since(subject.target, before):
            self.add_report_section("call", "by the subject", printed)
        self._conclude(result, part.name)

    def _send_canaries(self, kind: str) -> None:
        sent = self.subject.judging.canaries(kind)
        missed = [told if sent.get("lost") else f"a known-broken model passed: {told}" for told in sent["missed"]]
        self.user_properties.append((CANARIES, [kind, sent["caught"], sent["sent"], missed]))
        if missed:
            pytest.fail(f"VOID: {'; '.join(missed)}", pytrace=False)

    def _conclude(self, result: Result, name: str) -> None:
        judging = self.subject.judging
        if result.outcome == OPEN and judging.params["allow_open"]:
            return
        if result.counterexample and result.outcome not in (PASS, DEVIATION, NOT_APPLICABLE):
            with contextlib.suppress(OSError):  # the failure is told without the commands that need the files
                judging.record(self.subject.target, result)
        conclude(result, judging.statement(self.name), name, self.subject.target)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where it stands, and how it is headed when it fails."""
        return self.path, None, f"{self.name} on {self.subject.name}"
