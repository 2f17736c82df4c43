"""The subjects of a run of pytest and their rows, judged in processes of their own by the tasks of `check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from veriformer.cli.plugged import with_plugins
from veriformer.cli.processes.asking import Lost, Pool, RefusedError, Task
from veriformer.cli.processes.loading import Loaded, load_each
from veriformer.cli.processes.printed import Printed
from veriformer.cli.processes.wire import NoAnswerError
from veriformer.cli.recorded import write_cases
from veriformer.cli.running import Run, limit_on, named, unloaded
from veriformer.cli.saying import said
from veriformer.cli.testing.asked import in_pytests_words
from veriformer.properties.known.applying import apply_deviations
from veriformer.properties.known.deviations import Deviations, DeviationsError, read_deviations
from veriformer.properties.results.records import FAIL, LOADS, Result, SubjectReport
from veriformer.reports.printed import KEPT
from veriformer.reports.readable import readable
from veriformer.reports.records import CASES

Plan = dict[str, Any]
"""What is to be judged, as plain data: the workers of pytest-xdist get it from the process that starts them."""


class Judging:
    """Everything that one process of pytest has judged.

    Attributes:
        parts: the report of every subject, by target.
        faults: put into a subject, by target: name of the fault and what noticed it.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.settings = {name: params[name] for name in ("profile", "seed", "device", "dtypes", "call_seconds")}
        self.settings |= {"named": params["only"], **said(params["kind"], params["declares"])}
        self.parts: dict[str, SubjectReport] = {}
        self.faults: dict[str, list[list[Any]]] = {}
        self._run = Run(params["profile"], params["seed"], params["device"])
        try:
            judging = with_plugins(self.settings)
        except click.UsageError as problem:
            raise pytest.UsageError(problem.message) from None
        self._pool = Pool(1, judging, params["max_memory"], adopts=False)  # pytest and tests start others
        self._tasks: dict[str, dict[str, Task]] = {}
        self._selected: dict[str, list[Task]] = {}
        self._canaries: dict[str, dict[str, Any]] = {}
        self._ids: list[str] = []
        self._known = Deviations()

    def plan(self) -> Plan:
        """Load the subjects, and find out which properties apply to each.

        Raises:
            pytest.UsageError: a target, a property or an entry of the deviations names nothing.
        """
        params = self.params
        try:
            chosen = self._pool.ask("select", only=params["only"], exclude=params["exclude"], level=params["level"])
            properties = [
                {k: p[k] for k in ("id", "level", "kinds", "requires", "statement")} for p in chosen["properties"]
            ]
            loaded, versions = load_each(self._pool, params["targets"], [p["id"] for p in properties])
            known = read_deviations(params["deviations_file"])
            known.must_name(chosen["catalogue"])
            known.must_speak_of([*named(loaded)])
        except (RefusedError, DeviationsError) as problem:
            raise pytest.UsageError(readable(in_pytests_words(str(problem)))) from None
        return {
            "properties": properties, "size": len(chosen["catalogue"]), "versions": versions,
            "subjects": [{**s, "rows": self._applicable(s, properties)} for one in loaded for s in one.subjects],
            "lost": [[one.target, one.why.why, one.why.outcome] for one in loaded if one.why],
        }  # fmt: skip

    def _applicable(self, described: dict[str, Any], properties: list[dict[str, Any]]) -> list[str]:
        """Return the ids of what applies to a subject; of one that does not answer, whatever speaks of its kind."""
        found = [p["id"] for p in properties if described["kind"] in p["kinds"]]
        target, seconds = described["target"], limit_on(described, self.params["profile"])
        answers: list[list[str]] = []

        def done(answer: dict[str, Any]) -> None:
            if not set(answer["props"]) <= set(found):
                raise NoAnswerError
            answers.append([prop for prop in found if prop in answer["props"]])

        asked = {"target": target, "props": found}
        self._pool.run([Task("applicable", lambda: asked, done, lambda why: None, [], seconds, target)])
        return answers[0] if answers else found

    def adopt(self, plan: Plan) -> None:
        """Take over a plan, made here or in the process that starts this one."""
        self._ids = [p["id"] for p in plan["properties"]]
        self._run.statements = {p["id"]: p["statement"] for p in plan["properties"]}
        self._run.report.versions |= plan["versions"]
        for target, why, outcome in plan["lost"]:
            self.parts[target] = unloaded(Loaded(target), Lost(why, outcome))
        for described in plan["subjects"]:
            part = self._run.begun(described, Printed())
            properties = [p for p in plan["properties"] if p["id"] in described["rows"]]
            limit = limit_on(described, self.params["profile"])
            self.parts[part.target] = part
            self._tasks[part.target] = self._run.rows(part, properties, limit, lambda: None)
        self._known = self._deviations()

    def _deviations(self) -> Deviations:
        """Return the entries; one about several subjects may hold on some of them, which no single test can know."""
        known = read_deviations(self.params["deviations_file"])
        several = [e for e in known.entries if sum(e.speaks_of(p.name, t) for t, p in self.parts.items()) > 1]
        known.entries = [replace(e, is_shipped=True) if e in several else e for e in known.entries]
        return known

    def select(self, rows: Iterable[tuple[str, str]]) -> None:
        """Note which rows are to run, as pairs of target and property: power is that of these together."""
        for target, prop in rows:
            if prop in self._tasks.get(target, {}):
                self._selected.setdefault(target, []).append(self._tasks[target][prop])

    def canaries(self, kind: str) -> dict[str, Any]:
        """Send the known-broken models of a kind, once in a process; return what became of them."""
        if kind not in self._canaries:
            self._pool.run([self._run.canaries([kind], self._ids)])
            self._canaries[kind] = self._run.report.canaries or {}
        return self._canaries[kind]

    def judged(self, target: str, prop: str) -> Result:
        """Return the result of a row, the known deviations applied.

        What it requires is judged before, so that rows may run alone. A failure may turn out to be a question once all
        is known that the others suggest: all rows of its subject are judged before it is told.
        """
        if prop != LOADS:
            self._pool.run(_unfinished([self._tasks[target][prop]]))
        result = self._settled(target, prop)
        if result.outcome == FAIL:
            self.prove(target)
            result = self._settled(target, prop)
        return result

    def prove(self, target: str) -> None:
        """Judge what is left of a subject's rows, then put faults into it."""
        rows = self._selected.get(target, [])
        if target in self.faults or not rows:
            return
        power = self._run.power(self.parts[target], rows, lambda: None)
        self._pool.run([*_unfinished(rows), power])
        told = self.parts[target].power or {"faults": []}
        self.faults[target] = [[f["name"], f["noticed_by"]] for f in told["faults"]]

    def record(self, target: str, result: Result) -> None:
        """Write down a case, for `veriformer replay`, and its script.

        Raises:
            OSError: the folder cannot be written to.
        """
        report = replace(self._run.report, subjects=[replace(self.parts[target], results=[result])])
        write_cases(report, Path(CASES), self.settings)

    def statement(self, prop: str) -> str:
        """Return what a property says; of the row of a target that cannot be loaded, that it can be."""
        return self._run.statements.get(prop, "The target can be loaded.")

    def printed(self, target: str) -> int:
        """Return how many bytes a subject's code has printed by now."""
        return self._run.printed[target].size if target in self._run.printed else 0

    def printed_since(self, target: str, size: int) -> str:
        """Return what a subject's code has printed since it had printed so many bytes: the last of it."""
        new = min(self.printed(target) - size, KEPT)
        if new <= 0:
            return ""
        return readable(self._run.printed[target].kept[-new:].decode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """End the processes."""
        self._pool.__exit__()

    def _settled(self, target: str, prop: str) -> Result:
        """Return a result as the deviations have it; the report keeps what was found, which other rows wait for."""
        part = self.parts[target]
        part = replace(part, results=[replace(result) for result in part.results])
        apply_deviations(replace(self._run.report, subjects=[part]), self._known)
        return next(result for result in part.results if result.id == prop)


def _unfinished(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that are not finished, each behind those that it needs."""

    def needed(task: Task) -> Iterator[Task]:
        for other in task.needs:
            yield from needed(other)
        yield task

    found = {id(one): one for task in tasks for one in needed(task) if not one.finished}
    return list(found.values())
