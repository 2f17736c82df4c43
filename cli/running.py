"""A run in the making: from what was loaded to tasks for processes that judge, and from their answers to a report.

`check` and pytest judge so, and `sweep` what ended its process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from veriformer.cli.processes.asking import Judges, Lost, Task
from veriformer.cli.processes.loading import Loaded
from veriformer.cli.processes.printed import Printed
from veriformer.cli.processes.wire import NoAnswerError
from veriformer.properties.bench.profiles import PROFILES
from veriformer.properties.results.reading import result_of
from veriformer.properties.results.records import LOADS, Report, Result, SubjectReport, plain, reach_of, unreached_of
from veriformer.reports.readable import as_name, cleaned
from veriformer.reports.schema import is_subject

_STATED = ("statement", "formula", "source", "why")


def limit_on(described: dict[str, Any], profile: str) -> float:
    """Return the limit for one property of a subject that was loaded: a large instance has a plan of its own."""
    usual = PROFILES[profile].property_seconds
    return limit_of((described["plan"] or {}).get("property_seconds", usual))


def limit_of(property_seconds: float) -> float:
    """Return the limit for one property: a search may shrink for as long as it looked, then call once more."""
    return 2 * property_seconds + 60


class Run:
    """A report in the making."""

    def __init__(self, profile: str, seed: int, device: str) -> None:
        self.report = Report([], seed, profile, device)
        self.statements: dict[str, str] = {}
        self.catalogue_size = 0
        self.interrupted = False
        self.printed: dict[str, Printed] = {}

    def judge(
        self, pool: Judges, chosen: dict[str, Any], loaded: list[Loaded], err: Console, *, with_canaries: bool = True
    ) -> None:
        """Judge every subject that was loaded by every chosen property, and put faults into each."""
        started = time.perf_counter()
        properties = chosen["properties"]
        self.catalogue_size = len(chosen["catalogue"])
        subjects = [described for one in loaded for described in one.subjects]
        self.statements = {p["id"]: p["statement"] for p in properties}
        self.report.properties = {p["id"]: {name: p[name] for name in _STATED} for p in properties}
        order = [p["id"] for p in properties]
        try:
            with Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=err, transient=True, disable=not err.is_terminal,
            ) as progress:  # fmt: skip
                bar = progress.add_task("judging", total=len(subjects) * (len(properties) + 1))
                kinds = [d["kind"] for d in subjects]
                tasks: list[Task] = [self.canaries(kinds, order)] if with_canaries else []
                for one in loaded:
                    if one.why is not None:
                        self.report.subjects.append(unloaded(one, one.why))
                    for described in one.subjects:
                        part = self.begun(described, one.printed)
                        if planned := cleaned(described["plan"]):
                            err.print(planned["sentence"], style="dim", markup=False, highlight=False, soft_wrap=True)
                        advance = functools.partial(progress.update, bar, advance=1, description=part.name)
                        rows = self.rows(part, properties, limit_on(described, self.report.profile), advance)
                        tasks += [*rows.values(), self.power(part, [*rows.values()], advance)]
                pool.run(tasks)
        finally:
            for part in self.report.subjects:
                part.results.sort(key=lambda r: order.index(r.id) if r.id in order else -1)
                part.printed = self._printed_by(part) or part.printed
                part.reach, part.unreached = reach_of(part.results), unreached_of(part.results)
            self.report.seconds = time.perf_counter() - started

    def _printed_by(self, part: SubjectReport) -> dict[str, Any] | None:
        printed = self.printed.get(part.target)
        return printed.shown if printed is not None else None

    def begun(self, described: dict[str, Any], printed: Printed) -> SubjectReport:
        """Return the report of a subject of which nothing is known but what loading it told."""
        target = described["target"]
        part = SubjectReport(as_name(described["name"]), described["kind"], target, cleaned(described["facts"]))
        part.believed, part.claims = list(part.facts), cleaned(described["claims"])
        part.plan = (cleaned(described["plan"]) or {"told": ""})["told"]
        self.report.subjects.append(part)
        self.printed[target] = Printed()
        self.printed[target] += printed
        return part

    def canaries(self, kinds: list[str], order: list[str]) -> Task:
        """Return the task that comes first: known-broken models, which this run must notice."""

        def sent(answer: dict[str, Any]) -> None:
            self.report.canaries = answer

        def lost(why: Lost) -> None:
            missed = [f"the canaries were not judged: {cleaned(why.why)}"]
            self.report.canaries = {"sent": 1, "caught": 0, "missed": missed, "lost": True}

        seconds = 60.0 + 10 * len(set(kinds))
        return Task("canaries", lambda: {"kinds": sorted(set(kinds)), "props": order}, sent, lost, [], seconds)

    def rows(
        self, part: SubjectReport, properties: list[dict[str, Any]], seconds: float, advance: Callable[[], None]
    ) -> dict[str, Task]:
        """Return the task of every property, by id: what it requires of the others stands among its needs."""
        found: dict[str, Task] = {}
        printed, empty = self.printed[part.target], _empty(part)

        def judged(answer: dict[str, Any]) -> None:
            record, verified = answer["result"], [str(name) for name in answer["verified"]]
            if not is_subject({**empty, "results": [record], "probed": answer["probed"]}):
                raise NoAnswerError
            part.results.append(result_of(cleaned(record)))
            part.seconds += part.results[-1].seconds
            part.probed = answer["probed"] or part.probed
            part.believed = [name for name in part.believed if name not in verified]
            advance()

        for prop in properties:

            def lost(why: Lost, prop: dict[str, Any] = prop) -> None:
                part.results.append(Result(prop["id"], prop["level"], why.outcome, cleaned(why.why)))
                advance()

            def arguments(prop: dict[str, Any] = prop) -> dict[str, Any]:
                known = {r.id: r.outcome for r in part.results if r.id in prop["requires"]}
                return {"target": part.target, "prop": prop["id"], "known": known}

            needs = [found[i] for i in prop["requires"] if i in found]
            found[prop["id"]] = Task("judge", arguments, judged, lost, needs, seconds, part.target, printed)
        return found

    def power(self, part: SubjectReport, rows: list[Task], advance: Callable[[], None]) -> Task:
        """Return the task that puts faults into a subject, once these rows are judged; it weighs failures again."""
        empty = _empty(part)

        def proven(answer: dict[str, Any]) -> None:
            given = {name: answer[name] for name in ("power", "never_walked", "anatomy")}
            if not is_subject({**empty, "results": answer["reconsidered"], **given}):
                raise NoAnswerError
            changed = {record["id"]: result_of(record) for record in cleaned(answer["reconsidered"])}
            part.results[:] = [changed.get(r.id, r) for r in part.results]
            part.power, part.never_walked = answer["power"], answer["never_walked"]
            part.anatomy = answer["anatomy"]
            advance()

        def power_of() -> dict[str, Any] | None:
            if not any(r.outcome in ("PASS", "FAIL", "OPEN") for r in part.results):
                return None
            passed = [r.id for r in part.results if r.outcome == "PASS"]
            walked = sorted({path for r in part.results for path in r.paths})
            troubled = [plain(r) for r in part.results if r.outcome in ("FAIL", "OPEN")]
            return {"target": part.target, "props": passed, "walked": walked, "troubled": troubled}

        def unproven(why: Lost) -> None:
            if why.outcome != "BLOCKED":
                part.power = {"noticed": 0, "tried": 0, "missed": [], "faults": [], "why": cleaned(why.why)}
            advance()

        seconds = max((row.seconds for row in rows), default=0.0)
        return Task("power", power_of, proven, unproven, rows, seconds, part.target, self.printed[part.target])


def named(loaded: list[Loaded]) -> Iterator[tuple[str, str]]:
    """Yield the name and the target of every subject, also of those that were not loaded."""
    for one in loaded:
        yield from ((as_name(s["name"]), s["target"]) for s in one.subjects)
        if one.why is not None:
            yield attribute_of(one.target), one.target


def unloaded(one: Loaded, why: Lost) -> SubjectReport:
    """Return the report of a target that could not be loaded: one row."""
    part = SubjectReport(attribute_of(one.target), "unknown", one.target, printed=one.printed.shown)
    reason = "; ".join(line.strip() for line in why.why.splitlines())
    part.results.append(Result(LOADS, "core", why.outcome, cleaned(reason)))
    return part


def attribute_of(target: str) -> str:
    """Return the name that a target's subject has as long as it is not loaded."""
    return target.rpartition(":")[2] or target


def _empty(part: SubjectReport) -> dict[str, Any]:
    """Return the record of a subject without results: the frame in which answers are held against the schema."""
    return plain(SubjectReport(part.name, part.kind, part.target))
