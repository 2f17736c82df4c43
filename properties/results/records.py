"""What a run found: plain records, and the JSON they become (`veriformer-report/1`)."""

from __future__ import annotations

import functools
import html
import math
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = "veriformer-report/1"

PASS = "PASS"
FAIL = "FAIL"
OPEN = "OPEN"
DEVIATION = "DEVIATION"
UNEXPECTED_PASS = "UNEXPECTED_PASS"
NOT_APPLICABLE = "NOT_APPLICABLE"
BLOCKED = "BLOCKED"
VACUOUS = "VACUOUS"
ERROR = "ERROR"
TIMEOUT = "TIMEOUT"
OUTCOMES = (PASS, FAIL, OPEN, DEVIATION, UNEXPECTED_PASS, NOT_APPLICABLE, BLOCKED, VACUOUS, ERROR, TIMEOUT)
"""Every outcome; only PASS passes. OPEN is a question: what was seen is a defect, or by design and to be declared."""

LOADS = "subject.loads"
"""The row of a target that could not be loaded."""


@dataclass
class Counterexample:
    """The smallest failing case.

    Attributes:
        id: short name, made from the subject, the property and the choices.
        choices: label to drawn value; all that a replay needs.
        sizes: sizes of the model, in words.
        headline: one sentence.
        got: value at the worst index.
        expected: value required there.
        index: worst index.
        error: measured.
        unit: what one unit of the error is, in words; "" where it is the difference of the two values itself.
        tolerance: in the same unit.
        path: how the subject was called.
        cause: measured likely cause, or "".
        influence: `{"magnitude": [[...]], "allowed": [[...]]}`, or None.
        script: source of the standalone script, or "".
    """

    id: str
    choices: dict[str, Any]
    sizes: str
    headline: str
    got: str = ""
    expected: str = ""
    index: list[int] = field(default_factory=list)
    error: float = math.nan
    unit: str = ""
    tolerance: float = 0.0
    path: str = ""
    cause: str = ""
    influence: dict[str, Any] | None = None
    script: str = ""


@dataclass
class Result:
    """The outcome of one property on one subject.

    Attributes:
        id: of the property.
        level: "core" or "extended".
        outcome: one of `OUTCOMES`.
        reason: one sentence; for a PASS empty, or what was shown beyond it.
        declare: for an OPEN one, the line that answers the question if it is by design: `padding_side='right'`.
        examples: cases judged.
        witnesses: times the premise held.
        error: worst error.
        tolerance: its tolerance.
        margin: error / tolerance at the worst place.
        seconds: wall time.
        subject_seconds: of which inside the subject.
        paths: times each path was walked.
        measures: what was measured beside, the largest of each.
        reach: by the name of a size its smallest and largest value that was called with; dtypes.
        unreached: what was left out, with the reason: `T 1024 (refused beyond 100)`.
        counterexample: for a FAIL, and for an OPEN one that a property found.
    """

    id: str
    level: str
    outcome: str
    reason: str = ""
    declare: str = ""
    examples: int = 0
    witnesses: int = 0
    error: float = 0.0
    tolerance: float = 0.0
    margin: float = 0.0
    seconds: float = 0.0
    subject_seconds: float = 0.0
    paths: dict[str, int] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    reach: dict[str, list[Any]] = field(default_factory=dict)
    unreached: list[str] = field(default_factory=list)
    counterexample: Counterexample | None = None


@dataclass
class SubjectReport:
    """All results of one subject.

    Attributes:
        name: of the subject.
        kind: of the subject.
        target: how the command line names it.
        facts: declared.
        probed: facts found out rather than declared, in words.
        believed: facts that were declared and that no property of the run could have told from false ones.
        power: `{"noticed": k, "tried": n, "missed": [names], "faults": [...]}`: faults put into this subject, and which
            property of the run noticed each; None if none was tried. Where the stage did not come back, with "why".
        never_walked: forms of path that no property walked, each with the reason.
        reach: how far the properties together looked: by the name of a size its smallest and largest value; dtypes.
        unreached: what properties left out and none reached, with the reason; by that sentence their ids.
        claims: sizes that it claims, named as in `reach`.
        plan: of a large instance, what is done with it; empty for any other.
        seconds: spent on it, by all processes together.
        anatomy: parts inside it that are recognised, in the order of the flow: `part`, `place`, `words`, `measured`.
        printed: `{"size", "text"}`: how many bytes its code printed, and the last of them; None if it printed nothing.
        results: one a property; for what could not be loaded `LOADS` alone.
    """

    name: str
    kind: str
    target: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    probed: list[str] = field(default_factory=list)
    believed: list[str] = field(default_factory=list)
    power: dict[str, Any] | None = None
    never_walked: dict[str, str] = field(default_factory=dict)
    reach: dict[str, list[Any]] = field(default_factory=dict)
    unreached: dict[str, list[str]] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    plan: str = ""
    seconds: float = 0.0
    anatomy: list[dict[str, Any]] = field(default_factory=list)
    printed: dict[str, Any] | None = None
    results: list[Result] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Return how many results have this outcome."""
        return sum(r.outcome == outcome for r in self.results)

    @property
    def applicable(self) -> int:
        """Results other than NOT_APPLICABLE."""
        return len(self.results) - self.count(NOT_APPLICABLE)


def believed(declared: Iterable[str], verified: Iterable[str]) -> list[str]:
    """Return the declared facts that nothing verified, in the order of their declaration."""
    return [name for name in declared if name not in set(verified)]


def reach_of(results: Iterable[Result]) -> dict[str, list[Any]]:
    """Return how far several properties together looked."""
    together: dict[str, list[Any]] = {}
    for result in results:
        for name, seen in result.reach.items():
            known = [*together.get(name, ()), *seen]
            is_words = isinstance(known[0], str)
            together[name] = list(dict.fromkeys(known)) if is_words else [min(known), max(known)]
    return together


def unreached_of(results: Iterable[Result]) -> dict[str, list[str]]:
    """Return what properties left out and no other one reached: the sentence that says so, and their ids."""
    judged = list(results)
    reach, together = reach_of(judged), dict[str, list[str]]()
    for result in judged:
        for told in result.unreached:
            if not _is_reached(told, reach):
                together.setdefault(told, []).append(result.id)
    return together


def _is_reached(told: str, reach: Mapping[str, list[Any]]) -> bool:
    """Whether what a property says that it did not reach (`T 1024 (memory)`) was reached by another one."""
    name, _, value = told.partition(" (")[0].rpartition(" ")
    seen = reach.get(name, [0])
    return told.partition(" ")[0] in reach.get("dtype", ()) or (value.isdigit() and int(value) <= seen[-1])


class ViolationsFoundError(AssertionError):
    """Raised by `Report.raise_for_violations`; lists what does not hold."""


@dataclass(repr=False)
class Report:
    """The outcome of a run.

    Attributes:
        subjects: one report a subject.
        seed: of the run.
        profile: of the run.
        device: of the run.
        versions: of Python, torch, veriformer ...
        seconds: wall time.
        canaries: `{"sent": n, "caught": k, "missed": [...]}`: known-broken models that went through the engine first.
        allow_open: whether open questions leave the exit status at 0.
        properties: what the properties of the run state, by id: `{"statement", "formula", "source", "why"}`.

    Printed it is the summary and every failure; in a notebook, the page that `save` writes.
    """

    subjects: list[SubjectReport]
    seed: int
    profile: str
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=lambda: versions())
    seconds: float = 0.0
    canaries: dict[str, Any] | None = None
    allow_open: bool = False
    properties: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def results(self) -> list[Result]:
        """Results of all subjects, one after another."""
        return [r for s in self.subjects for r in s.results]

    @property
    def exit_status(self) -> int:
        """0: all applicable properties hold. 1: one does not, or is open. 2: nothing could be judged.

        A missed canary voids the run (2) whatever else was found. An ERROR or TIMEOUT beside judged properties
        is the subject failing on an input that its kind allows (1); a subject without one judged property, or a
        VACUOUS result alone, is something that could not be judged (2).
        """
        outcomes = {r.outcome for r in self.results}
        if self.canaries and self.canaries["missed"]:
            return 2
        if outcomes & {FAIL, UNEXPECTED_PASS} or (OPEN in outcomes and not self.allow_open):
            return 1
        judged = {PASS, DEVIATION, OPEN}
        if not self.subjects or not all(any(r.outcome in judged for r in s.results) for s in self.subjects):
            return 2
        if outcomes & {ERROR, TIMEOUT}:
            return 1
        return 2 if outcomes & {VACUOUS, BLOCKED} else 0

    @property
    def ok(self) -> bool:
        """Whether all applicable properties hold, and at least one was judged."""
        return self.exit_status == 0

    def raise_for_violations(self) -> None:
        """Raise if anything failed or could not be judged.

        Raises:
            ViolationsFoundError: with one line a property.
        """
        if not self.ok:
            lines = [f"canary missed, the run is void: {told}" for told in (self.canaries or {}).get("missed", ())]
            lines += [f"{s.name}: {r.id}: {r.outcome}: {r.reason}" for s, r in self._troubles()]
            raise ViolationsFoundError("\n".join(lines) or "no property could be judged")

    def _troubles(self) -> Iterator[tuple[SubjectReport, Result]]:
        for subject in self.subjects:
            for result in subject.results:
                if result.outcome not in (PASS, NOT_APPLICABLE, DEVIATION, *([OPEN] * self.allow_open)):
                    yield subject, result

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data under `veriformer-report/1`; NaN and infinities become null."""
        spoken = {r.id for r in self.results if r.outcome != NOT_APPLICABLE}
        return {
            "schema": SCHEMA,
            "versions": self.versions,
            "environment": environment(),
            "seed": self.seed,
            "profile": self.profile,
            "device": self.device,
            "tf32": False,
            "seconds": round(self.seconds, 3),
            "canaries": self.canaries,
            "allow_open": self.allow_open,
            "properties": {name: told for name, told in self.properties.items() if name in spoken},
            "subjects": [plain(s) for s in self.subjects],
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Write report.json, .html, .md, junit.xml and badge.svg into a folder, and the scripts of the failures.

        Returns:
            The files, each of them whole.

        Raises:
            OSError: the folder cannot be written to.
        """
        from veriformer.reports.formats import write_all, write_scripts  # a check needs no templates
        from veriformer.reports.records import CASES

        record, scripts = self._cleaned(), Path(folder) / CASES

        def repeat(subject: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, str]:
            script = shlex.join(["python", str(scripts / f"{case['id']}.py")]) if case.get("script") else ""
            return {"again": "", "script": script}

        return [*write_all(record, Path(folder), repeat), *write_scripts(record, Path(folder))]

    def __repr__(self) -> str:
        from veriformer.reports.terminal import report_text

        return report_text(self._cleaned())

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own: its styles are not those of the notebook."""
        from veriformer.reports.report_page import page

        frame = "width: 100%; height: 40rem; border: 0; background: white"
        return f'<iframe srcdoc="{html.escape(page(self._cleaned()))}" style="{frame}"></iframe>'

    def _cleaned(self) -> dict[str, Any]:
        from veriformer.reports.readable import cleaned

        record: dict[str, Any] = cleaned(self.to_json())
        return record


def plain(value: Any) -> Any:
    """Return a record as JSON data: dataclasses as objects, floats to six digits, NaN and infinities as null."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if isinstance(value, int | str | bool | None) else str(value)


def environment() -> dict[str, Any]:
    """Return what of the machine a duration depends on."""
    return {"platform": platform.platform(), "cores": os.cpu_count()}


def versions(packages: Iterable[str] = ("veriformer", "torch", "hypothesis", "numpy")) -> dict[str, str]:
    """Return the versions that a result depends on, by name."""
    return {"python": platform.python_version(), **{name: _release(name) for name in packages}}


@functools.cache  # every report of a run asks, and looking a release up reads files
def _release(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
