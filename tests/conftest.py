"""What several test files need: the built wheel; markers and the last line of the verification.

These hooks stand here, since the process that hands tests to the workers loads no conftest further down.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verification import counting

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Make each family of properties a marker."""
    ids = (ROOT / "tests/properties/judging/catalogue_ids.txt").read_text(encoding="utf-8").split()
    for family in dict.fromkeys(i.partition(".")[0] for i in ids):
        config.addinivalue_line("markers", f"{family}: properties of the family {family}")


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count what does not apply to its subject as that: neither passed nor skipped."""
    if counting.does_not_apply(report):
        return "not applicable", "-", "NOT APPLICABLE"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with what was verified."""
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    if told := counting.verified(reports):
        terminalreporter.write_line(told)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, without a network."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "conftest.py", "MANIFEST.in"):
        shutil.copy(ROOT / file, source)
    out = source / "dist"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built
