"""ARCHITECTURE.md names functions and files that exist, and tells every room."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from test_imports import ROOMS

TEXT = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`((?:clusters|reference|properties|ablations|reports|cli)(?:\.\w+)+(?::\w+)?)`", TEXT)))
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name: str) -> None:
    module, _, attribute = name.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    assert file.is_file(), f"there is no {file.relative_to(ROOT)}"
    defined: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            defined |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    assert not attribute or attribute in defined, f"{module} has no {attribute}"


def test_the_walks_are_long_enough_to_follow() -> None:
    assert len(NAMES) > 30


def test_the_words_in_the_text_are_true() -> None:
    case = importlib.import_module("veriformer.properties.engine.case")
    assert callable(case.Case.close)
    assert (
        importlib.import_module("veriformer.properties.judging.catalogue")
        .catalogue()["causality.no-future-influence"]
        .check.__name__
        in TEXT
    )
    assert callable(importlib.import_module("veriformer.ablations.running").Run.advance)


def test_every_room_is_told_in_order() -> None:
    told = list(re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE))
    assert tuple(told) == ROOMS["properties"]
