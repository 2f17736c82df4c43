"""What a test leaves behind is told, and the next one does not meet it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import left_behind
from veriformer.properties.adapters.places import Beside
from veriformer.properties.targets import load

CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path": (lambda folder: sys.path.insert(0, str(folder)), "another sys.path"),
    "less of the path": (lambda folder: sys.path.pop(), "less of it"),
    "a finder": (lambda folder: sys.meta_path.insert(0, Beside(str(folder))), "other finders"),
    "fewer finders": (lambda folder: sys.meta_path.pop(0), "other finders of imports: fewer"),
    "the dtype": (lambda folder: torch.set_default_dtype(torch.float64), "torch.float64"),
    "the gradient mode": (lambda folder: torch.set_grad_enabled(False), "other flags of torch"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_and_put_back(name: str, tmp_path: Path) -> None:
    change, words = CHANGES[name]
    before = left_behind.seen()
    change(tmp_path)
    assert words in left_behind.changed(before)
    assert left_behind.changed(before) == ""


def test_a_module_of_a_folder_that_will_be_gone_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_stray.py").write_text("A = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = left_behind.seen()
    importlib.import_module("a_stray")
    assert left_behind.changed(before) == ""
    assert "a_stray" not in sys.modules


def test_what_a_target_keeps_for_itself_is_none(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("A = 1\n", encoding="utf-8")
    source = "import beside_it\nfrom veriformer.properties import Subject\n"
    source += "mine = Subject(kind='softmax', forward=lambda model, x, dim=-1: x.softmax(dim))\n"
    (tmp_path / "of_a_user.py").write_text(source, encoding="utf-8")
    before = left_behind.seen()
    load(f"{tmp_path / 'of_a_user.py'}:mine")
    assert left_behind.changed(before) == ""
