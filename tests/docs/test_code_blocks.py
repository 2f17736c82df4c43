"""Every block of code of a hand-written page runs, and prints what the page shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from page_blocks import Block, Reader, blocks, forget
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.engine import property as engine
from veriformer.properties.judging.catalogue import catalogue

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))
ENVIRONMENT = {"COLUMNS": "80", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
RUN = [page for page in PAGES if any(True for _ in blocks((DOCS / page).read_text(encoding="utf-8")))]


@pytest.mark.parametrize("page", RUN)
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    if "timm" in page:
        name_operators()  # torchvision's compiled part does not load beside a CPU build of torch
    catalogue()  # whole, before a page adds properties of its own to what is put back
    monkeypatch.setattr(engine, "_REGISTRY", dict(engine._REGISTRY))
    reader = Reader()
    try:
        for block in blocks((DOCS / page).read_text(encoding="utf-8")):
            reader.follow(block)
    finally:
        forget(tmp_path)


def test_most_pages_have_code() -> None:
    assert len(RUN) >= 12


def test_a_page_that_says_what_is_not_so_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader()
    reader.follow(Block("python", "", "print(1 + 1)\n"))
    reader.follow(Block("text", "prints", "2\n"))
    with pytest.raises(AssertionError, match="the page shows\n3"):
        reader.follow(Block("text", "prints", "3\n"))
    with pytest.raises(ZeroDivisionError):
        reader.follow(Block("python", "", "1 / 0\n"))
    with pytest.raises(AssertionError, match=r"explain no\.such: 3"):
        reader.follow(Block("bash", "", "veriformer explain no.such  # exit status 0\n"))
    assert os.listdir() == []
