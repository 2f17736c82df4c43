"""SECURITY.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMED = sorted(set(re.findall(r"`(tests/\w+/\w+\.py):(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_case_has_its_test(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_cases() -> None:
    assert len(NAMED) > 20
