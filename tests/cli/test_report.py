"""`veriformer report`: a stored record is shown again; a broken one gets one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from veriformer.cli.report import report
from veriformer.reports.records import write_json

RECORD: dict[str, Any] = {
    "format": "veriformer-ablation/1", "command": "veriformer ablate x", "date": "2026-01-01", "seeds": 2,
    "device": "cpu", "device_name": "cpu", "versions": {"torch": "2", "python": "3"},
    "trials": {"finished": 0, "missing": 0, "failures": {}},
    "sinusoidal": None,
    "studies": [
        {"name": "p", "question": "how fast?", "source": "s", "variants": [], "tasks": [], "tests": 0, "warnings": [],
         "missing": 0, "noise": [], "rows": [], "points": [], "fit": {"kind": "x", "lines": ["it is fast"]}}
    ],
}  # fmt: skip


def run(file: Path, *more: str) -> Any:
    return CliRunner().invoke(report, [str(file), *more], standalone_mode=False)


def test_a_record_is_shown_and_rendered(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", RECORD)
    done = run(tmp_path / "a.json", "--out", str(tmp_path / "out"))
    assert done.return_value == 0
    assert "it is fast" in done.output
    assert "it is fast" in (tmp_path / "out" / "index.html").read_text()


def text(record: Any) -> str:
    return json.dumps(record)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (text(RECORD)[:200], "is truncated or was edited"),
        ("[]", "holds list, where a JSON object is required"),
        (
            text({"format": "veriformer-report/1"}),
            "is neither a veriformer-report/1 nor a veriformer-ablation/1; give the file of a run",
        ),
        (text({**RECORD, "studies": [{"name": "p"}]}), "is no whole veriformer-ablation/1 record"),
        (text({**RECORD, "studies": 5}), "is no whole veriformer-ablation/1 record"),
    ],
)
def test_a_broken_file_gets_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    done = run(tmp_path / "a.json")
    assert type(done.exception).__name__ == "UsageError"
    assert message in str(done.exception)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no file" in str(run(tmp_path / "none.json").exception)
