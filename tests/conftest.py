"""What several test files need: what is made once for all workers, the built wheel, searches that no clock ends;
and the last line of the verification.

These hooks stand here, since the process that hands tests to the workers loads no conftest further down.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

import choosing
import left_behind
from dask_cluster import DaskCluster, running
from verification import counting
from veriformer.cli.processes.template import start, template
from veriformer.clusters import opening
from veriformer.clusters.memory import keep_freed_memory, seldom_collect
from veriformer.properties.bench import profiles

ROOT = Path(__file__).parent.parent

PRELOADED = (
    "veriformer.cli.processes.answering", "veriformer.tests.mutants.judging", "veriformer.ablations.execution.work",
    "torch._dynamo",
)  # fmt: skip
"""Of `check` and `replay`, `mutants` and `ablate`."""

_BEFORE = pytest.StashKey[left_behind.Seen]()

Once = Callable[[str, Callable[[Path], None]], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs all tests."""
    parser.addoption("--whole", action="store_true", help="all tests of veriformer: 20 minutes on two cores")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Decide once, for the workers too, whether all that is collected runs."""
    config.option.whole = not choosing.chooses(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a bare `pytest` leaves to `--whole`."""
    if not config.option.whole:
        left = choosing.left_to_the_whole(items)
        config.hook.pytest_deselected(items=left)
        out = set(map(id, left))
        items[:] = [item for item in items if id(item) not in out]


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Count what does not apply to its subject as that: neither passed nor skipped."""
    if isinstance(report, pytest.TestReport) and counting.does_not_apply(report):
        return "not applicable", "-", "NOT APPLICABLE"
    return None


def pytest_collection_finish() -> None:
    """Keep freed memory and seldom look for garbage, as the processes of `check` do."""
    keep_freed_memory()
    seldom_collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with what was verified."""
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    if told := counting.verified(reports):
        terminalreporter.write_line(told)
    if not terminalreporter.config.option.whole:
        terminalreporter.write_line("the verification, and each property shown failing once; all tests: pytest --whole")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test behind which the process is not as it was: the next one of this worker would meet another."""
    item.stash[_BEFORE] = left_behind.seen()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Look behind the fixtures, which put back what they changed."""
    yield
    if told := left_behind.changed(item.stash[_BEFORE]):
        pytest.fail(f"the test left behind {told}", pytrace=False)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return a function that makes a folder once in a run, however many workers share it: the first one that asks.

    What is made must be left as it is: other workers read it at the same time.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what a worker left that failed here
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def wheel(once: Once) -> Path:
    """Build the sdist from a copy of the sources, and the wheel from the sdist, without a network."""

    def build(folder: Path) -> None:
        source = folder / "source"
        shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file in ("pyproject.toml", "README.md", "LICENSE", "conftest.py", "MANIFEST.in"):
            shutil.copy(ROOT / file, source)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
        subprocess.run(command, check=True, capture_output=True)

    (built,) = once("wheel", build).glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(once: Once, wheel: Path) -> Path:
    """Return a folder with the wheel installed, and nothing else."""

    def install(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
        subprocess.run([*command, str(folder), str(wheel)], check=True, capture_output=True)

    return once("installed", install)


@pytest.fixture(scope="session")
def copies() -> None:
    """Let the one process that workers are copies of import what the workers of every command want.

    The tests that run here share it. What is left out by the command that happens to start it is imported by each
    worker of another for itself, which takes seconds.
    """
    start(template(*PRELOADED))


@pytest.fixture
def scheduler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaskCluster]:
    """Start a scheduler without workers."""
    monkeypatch.setattr(opening, "CONNECT_SECONDS", 600.0)  # a busy machine starts one slowly
    with running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(scheduler: DaskCluster) -> DaskCluster:
    """Start a scheduler and two workers."""
    for _ in range(2):
        scheduler.add_worker("--no-nanny")
    return scheduler


@pytest.fixture(scope="session", autouse=True)
def _examples_alone_end_a_search() -> Iterator[None]:
    """Take away what is timed: the seconds after which a search stops, and how slow a machine is for a large model."""
    with pytest.MonkeyPatch.context() as patch:
        for name, profile in profiles.PROFILES.items():
            patch.setitem(profiles.PROFILES, name, replace(profile, property_seconds=3600.0))  # type: ignore[arg-type]
        for name, (operations, profile) in profiles.LARGE_PROFILES.items():
            patient = operations, replace(profile, property_seconds=3600.0)
            patch.setitem(profiles.LARGE_PROFILES, name, patient)  # type: ignore[arg-type]
        patch.setattr("veriformer.properties.engine.searching.costs.slowness", lambda bench: 1)
        yield


@pytest.fixture(scope="module")
def brief(_examples_alone_end_a_search: None) -> Iterator[None]:
    """Draw two cases a property beside every colliding length: for right models by the dozen."""
    with pytest.MonkeyPatch.context() as patch:
        short = replace(profiles.PROFILES["quick"], examples=2)
        patch.setitem(profiles.PROFILES, "quick", short)  # type: ignore[arg-type]
        yield
