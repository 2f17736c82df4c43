"""The page of the table's verdicts on other seeds follows from the two tables that are kept, and tells what turned."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import loaded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded("repeated_table")


def test_the_page_is_what_the_two_tables_say(script: ModuleType) -> None:
    page = (ROOT / "reports" / "gallery" / "table" / "repeated.md").read_text(encoding="utf-8")
    assert page == script.page(script.rows(script.PUBLISHED), script.kept())


def test_a_verdict_that_turns_is_counted(script: ModuleType) -> None:
    before = {("precede", "2", "nothing"): ("base", "1"), ("precede", "2", "residual"): ("hurts", "0.8 [0.7, 0.9]"),
              ("precede", "2", "LayerNorm"): ("no evidence, unstable (60 % repeat)", "0.9 [0.8, 1.0]")}  # fmt: skip
    turned = before | {("precede", "2", "residual"): ("no evidence", "0.9 [0.8, 1.0]")}
    told = script.page(before, {"3000": turned, "4000": before})
    assert (
        "On seeds from 3000 on 1 of 2 verdicts are the same; of the 1 that the table does not call unstable, 0" in told
    )
    assert (
        "On seeds from 4000 on 2 of 2 verdicts are the same; of the 1 that the table does not call unstable, 1" in told
    )
    for other in ({}, {"3000": {}}):
        with pytest.raises(ValueError, match="hold other rows"):
            script.page(before, other)


def test_what_is_no_table_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no table of parts"):
        script.rows(tmp_path / "table.md")
