"""The wheel ships every package with its data, and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("clusters", "reference", "properties", "ablations", "reports", "cli", "tests/mutants", "tests/traps")


def test_the_wheel_ships_every_file_of_every_package(wheel: Path) -> None:
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith(".dist-info")}
    wanted = {
        f"veriformer/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "gallery" not in path.parts
    }
    assert shipped == wanted


def test_the_wheel_has_the_command_and_the_plugin(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    points = archive.read(name).decode()
    assert "veriformer = veriformer.cli.main:main" in points
    assert "veriformer = veriformer.properties.pytest_plugin" in points
