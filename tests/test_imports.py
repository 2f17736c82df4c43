"""Imports point one way, and what every pytest run in an environment loads is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "clusters", "reference", "properties", "ablations", "claims", "reports", "cli", "tests/mutants", "tests/traps",
)  # fmt: skip
BARE = {*(Path(f).name for f in FOLDERS)}
ALLOWED = {
    "clusters": {"clusters"},
    "reference": {"reference"},
    "properties": {"reference", "properties", "reports"},  # a report shows itself
    "ablations": {"reference", "clusters", "ablations"},
    "claims": {"reference", "properties", "ablations", "claims"},
    "reports": {"reports"},
    "cli": {"clusters", "reference", "properties", "ablations", "claims", "reports", "cli", "tests"},
    "tests": {"reference", "properties", "tests"},
}
ROOMS = {
    "properties": (
        "subject", "adapters", "definitions", "results", "bench", "engine", "anatomy", "twin", "probes", "causes",
        "formulas", "diagnosis", "families", "known", "power", "counterexamples", "judging",
    ),
    "ablations": (
        "tasks", "trials", "training", "statistics", "measuring", "studies", "execution", "verdicts", "table",
    ),
}  # fmt: skip
"""The rooms of a package in order: a room imports itself and the rooms before it. What stands in none is a door."""

LARGE = ("adapters", "families")  # one file a library, one a family
FILES = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py")) if "strangers" not in p.parts]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        assert parts[0] not in BARE, f"{name}: the bare name loads the module a second time"
        if parts[0] == "veriformer" and len(parts) > 1:
            assert parts[1] in ALLOWED[package], f"{package} must not import {name}"


def _room(parts: tuple[str, ...]) -> str | None:
    """Return the room that a path or module below a package lies in; None for a door of the package."""
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and parts[1] in ROOMS.get(parts[0], ())) else None


@pytest.mark.parametrize("path", [p for p in FILES if p.relative_to(ROOT).parts[0] in ROOMS],
                         ids=lambda p: str(p.relative_to(ROOT)))  # fmt: skip
def test_rooms_import_downwards(path: Path) -> None:
    package, *_ = parts = path.relative_to(ROOT).with_suffix("").parts
    room = _room(parts)
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        target = tuple(name.split(".")[1:])
        if room is None or name.split(".")[0] != "veriformer" or target[0] != package:
            continue
        order = ROOMS[package]
        other = _room(target)
        assert other in order, f"{room}/ must not import {name}, which is a door or stands in no room"
        assert order.index(other) <= order.index(room), f"{room}/ stands before {other}/ and must not import {name}"


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_its_place_and_is_no_hall(package: str) -> None:
    rooms = {p.parent.name: p.parent for p in (ROOT / package).glob("*/__init__.py")}
    assert set(rooms) == set(ROOMS[package])
    inner = {f"{p.parent.parent.name}/{p.parent.name}": p.parent for p in (ROOT / package).glob("*/*/__init__.py")}
    for name, folder in (rooms | inner).items():
        files = sorted(p.name for p in folder.glob("*.py"))
        assert name in LARGE or len(files) <= 13, f"{name}/ holds {files}"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), name


def test_no_cycles_at_module_level() -> None:
    edges: dict[str, set[str]] = {}
    names = {"veriformer." + ".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in FILES}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        edges[name] = {i for i in imported(ast.Module(body, [])) if i in names}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for needed in edges[name]:
                visit(needed, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize(
    "module",
    [
        "veriformer.properties",
        "veriformer.properties.pytest_plugin",
        "veriformer.reference",
        "veriformer.cli.main",
        "veriformer.cli.testing.plugin",
        "veriformer.cli.testing.door",
        "veriformer.cli.testing.failing",
    ],
)
def test_loads_no_torch(module: str) -> None:
    code = f"import {module}, sys; assert 'torch' not in sys.modules, 'torch is loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert not long


def test_there_is_one_list_of_allowed_edges_for_every_package() -> None:
    assert set(ALLOWED) == {f.split("/")[0] for f in FOLDERS}
