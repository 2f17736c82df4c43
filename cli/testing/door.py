"""The hooks of a run that judges."""

from __future__ import annotations

import re
from typing import Any

import pytest

from veriformer.cli.processes.asking import warm_up
from veriformer.cli.testing.asked import HAS_ALIAS, id_of, parameters, rows_among, target_of
from veriformer.cli.testing.counting import Counts
from veriformer.cli.testing.judging import Judging, Plan
from veriformer.cli.testing.rows import FOUND, Row, Subject
from veriformer.properties.results.records import LOADS, OPEN
from veriformer.reports.readable import one_line

_HANDED_OVER = "veriformer"


class Door:
    """One process of pytest in a run that judges: it runs rows, or hands them to workers and counts."""

    def __init__(self, config: pytest.Config) -> None:
        """Read what is asked, and take the ids of rows out of the arguments, where pytest would look for files.

        Raises:
            pytest.UsageError: something is asked that there is not.
        """
        self.config = config
        rows = rows_among(config)
        config.args = [word for word in config.args if word not in rows]
        here = [(target_of(config, target), prop) for target, prop in rows.values()]
        self._wanted = {(id_of(config, target), prop) for target, prop in here}
        given = config.getoption("veriformer")
        targets = [target for target, _ in here if re.sub(r"\[\d+\]$", "", target) not in given]
        params, self._settings = parameters(config, targets)
        self.judging = Judging(params)
        self._counts = Counts()
        self._plan: Plan | None = getattr(config, "workerinput", {}).get(_HANDED_OVER)
        if self._plan is None:  # a worker may never get a subject
            warm_up()

    @property
    def plan(self) -> Plan:
        """What is to be judged; found out once in a run."""
        if self._plan is None:
            self._plan = self.judging.plan()
            self._must_be_there()
        return self._plan

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand the plan to a worker of pytest-xdist, so that all of them have the same rows."""
        node.workerinput[_HANDED_OVER] = self.plan
        self.judging.close()  # who hands out judges no more

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Let each worker have whole subjects."""
        if config.option.dist != "loadgroup":
            return None
        from veriformer.cli.testing.handing_out import BySubject

        names = {target: id_of(config, target) for target in self._rows}
        return BySubject(config, log, {f"{names[t]}::{i}": names[t] for t, ids in self._rows.items() for i in ids})

    @property
    def _rows(self) -> dict[str, list[str]]:
        """The rows of every subject, by target."""
        rows = {subject["target"]: subject["rows"] for subject in self.plan["subjects"]}
        return rows | {lost[0]: [LOADS] for lost in self.plan["lost"]}

    def pytest_report_header(self) -> list[str]:
        """Say what is judged, and by which settings."""
        params = self.judging.params
        settings = f"profile {params['profile']}, seed {params['seed']}, {params['device']}"
        lines = [f"veriformer: {one_line(', '.join(params['targets']))}; {settings}"]
        if self._settings:
            lines.append(f"veriformer: {self._settings}")
        if not self.config.stash.get(HAS_ALIAS, True):
            lines.append("veriformer: --subject is another plugin's here; ours is --veriformer")
        return lines

    @pytest.hookimpl(tryfirst=True)  # before -k and -m choose
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the rows, one behind another subject by subject."""
        self.judging.adopt(self.plan)
        levels = {p["id"]: p["level"] for p in self.plan["properties"]}
        for target, props in self._rows.items():
            name = id_of(self.config, target)
            rows = {p: levels.get(p, "core") for p in props if not self._wanted or (name, p) in self._wanted}
            if rows:
                subject = Subject.from_parent(
                    session, name=name, nodeid=name, target=target, judging=self.judging, rows=rows
                )
                report = self.config.hook.pytest_make_collect_report(collector=subject)
                self.config.hook.pytest_collectreport(report=report)
                items += report.result

    def _must_be_there(self) -> None:
        """Raise if an id among the arguments is that of no row."""
        there = {(id_of(self.config, target), prop) for target, props in self._rows.items() for prop in props}
        if missing := sorted(self._wanted - there):
            name, prop = missing[0]
            known = any(name == subject for subject, _ in there)
            why = "it does not apply, or is not asked for" if known else "there is no such subject"
            raise pytest.UsageError(f"{name}::{prop} is no row of this run: {why}; `--collect-only -q` shows all rows")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what was chosen."""
        rows = [item for item in session.items if isinstance(item, Row)]
        self.judging.select((row.subject.target, row.name) for row in rows)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Count a question that is allowed as what it is."""
        found = dict(getattr(report, "user_properties", ())).get(FOUND)
        if found and found[2] == OPEN and report.when == "call" and report.passed:
            return "open", "o", "OPEN"
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report, also of a worker."""
        self._counts.take(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """End with what became of every subject."""
        params, size = self.judging.params, self._plan["size"] if self._plan else 0
        lines = [*self._counts.lines(
            profile=params["profile"], seed=params["seed"], device=params["device"], catalogue=size
        )]  # fmt: skip
        if lines:
            terminalreporter.section("veriformer")
        for line in lines:
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """End the processes."""
        self.judging.close()
