"""The pytest plugin: marks for the tests of properties, and how such a test fails. Loads no torch.

`pytest --veriformer TARGET` is the command's door and judges as it does: pytest finds it by the name below.
"""

from __future__ import annotations

import json
from importlib import resources

import pytest

from veriformer.properties.results import records as r
from veriformer.properties.results.records import Result

pytest_plugins = ("veriformer.cli.testing.plugin",)

LEVELS = {
    "core": "a property whose failure is a defect",
    "extended": "a property that follows from a declared convention",
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of every test of a property: its level, and its family."""
    recorded = resources.files("veriformer.properties.judging").joinpath("faults_killed.json")
    families = dict.fromkeys(i.partition(".")[0] for i in json.loads(recorded.read_text(encoding="utf-8")))
    families["subject"] = None  # of the row of a target that cannot be loaded
    for name, told in {**LEVELS, **{f: f"a property of the family {f}" for f in families}}.items():
        config.addinivalue_line("markers", f"{name}: {told}")


class Unheld(pytest.fail.Exception):  # type: ignore[name-defined,misc]  # it is made at run time
    """A property does not hold: ends a test without a traceback, which would lead through this package.

    Attributes:
        result: what was found.
        statement: of the property.
        subject: its name.
        target: how the command line names it; "" where it does not.
    """

    def __init__(self, result: Result, statement: str, subject: str, target: str) -> None:
        super().__init__(describe(result, statement, subject), pytrace=False)
        self.result, self.statement, self.subject, self.target = result, statement, subject, target


def conclude(result: Result, statement: str, subject: str, target: str = "") -> None:
    """End the running test as the outcome of a property on a subject says.

    A declared deviation is an expected failure; a property that does not apply is skipped with its reason.

    Args:
        result: of the property.
        statement: of the property.
        subject: its name.
        target: how the command line names it; "" where it does not.

    Raises:
        Unheld: it does not hold, or could not be judged.
    """
    if result.outcome == r.PASS:
        return
    if result.outcome == r.NOT_APPLICABLE:
        pytest.skip(result.reason)
    if result.outcome == r.DEVIATION:
        pytest.xfail(result.reason)
    raise Unheld(result, statement, subject, target)


def describe(result: Result, statement: str, subject: str) -> str:
    """Return the failure as text: the claim, the smallest case, numbers, the influence map, the likely cause."""
    from veriformer.reports.failure import failure_text  # what a passing test does not pay for
    from veriformer.reports.readable import cleaned

    head = f"{result.outcome} {result.id} on {subject}: {result.reason}"
    if result.counterexample is None:
        return f"{head}\n{statement}"
    return f"{head}\n\n{failure_text(cleaned(r.plain(result)), statement, subject)}"
