"""The workflow that is there to be copied, run as it is written, as far as that goes without a network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from veriformer.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "ci.md"
MODEL = """
from torch import nn


class GPT(nn.LayerNorm):
    def __init__(self):
        super().__init__(8)
"""


def test_the_workflow_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workflow,) = re.findall(
        r"```yaml [^\n]*workflows/veriformer.yml[^\n]*\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    installs, checks = (shlex.split(line) for line in re.findall(r"^ +- run: (.*)$", workflow, re.MULTILINE))
    assert (installs[0], checks[0]) == ("pip", "veriformer")
    (tmp_path / "mygpt.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*checks[1:], "--only", "norm"])
    assert ended.value.code == 0
    (folder,) = re.findall(r" path: (veriformer-\w+)", workflow)  # what is uploaded, hidden files too
    assert {"report.json", "report.html", "junit.xml", "badge.svg"} <= {p.name for p in (tmp_path / folder).iterdir()}
