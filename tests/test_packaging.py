"""The wheel ships every package with its data, and nothing else."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "clusters", "reference", "properties", "ablations", "claims", "reports", "cli", "tests/mutants", "tests/traps",
)  # fmt: skip


def test_the_wheel_ships_every_file_of_every_package(wheel: Path) -> None:
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith(".dist-info")}
    wanted = {
        f"veriformer/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "gallery" not in path.parts
    }
    assert shipped == wanted


def test_the_wheel_has_what_is_no_code(wheel: Path) -> None:
    shipped = {n.removeprefix("veriformer/") for n in zipfile.ZipFile(wheel).namelist()}
    assert {
        "cli/index.json", "properties/py.typed", "properties/judging/faults_killed.json",
        "tests/mutants/documented.jsonl", "tests/mutants/equivalent.toml", "reports/report.schema.json",
    } <= shipped  # fmt: skip
    assert [n for n in shipped if n.startswith("reports/templates/") and n.endswith(".j2")]
    assert [n for n in shipped if n.startswith("properties/known/") and n.endswith(".toml")]
    assert [n for n in shipped if n.startswith("tests/traps/") and n.endswith(".py")]


def test_the_release_is_built_and_tried_before_it_is_published() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    steps = [workflow.index(words) for words in ("run: .ci/release", "needs: build", "gh-action-pypi-publish")]
    assert steps == sorted(steps)
    assert "id-token: write" in workflow
    assert "password" not in workflow
    assert "secrets." not in workflow
    script = (ROOT / ".ci" / "release").read_text(encoding="utf-8")
    oldest = re.search(r'"torch>=([\d.]+)",$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert oldest is not None, ".ci/release reads it so"
    assert 's/^ *"torch>=\\([0-9.]*\\)",$/\\1/p' in script
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "release")], check=True)


def test_the_wheel_has_the_command_and_the_plugin(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    points = archive.read(name).decode()
    assert "veriformer = veriformer.cli.main:main" in points
    assert "veriformer = veriformer.properties.pytest_plugin" in points
