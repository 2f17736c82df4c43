"""Recorded cases: what may be loaded for them, and commands that work as they are printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from veriformer.cli.recorded import find_case, how_to_repeat, trusted
from veriformer.reports.records import RecordError

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for place in (".veriformer/deeper", "elsewhere/.veriformer"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "ab12cd34.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".veriformer" / "0123abcd.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".veriformer" / "0f0f0f0f.json").symlink_to(tmp_path / "elsewhere/.veriformer/ab12cd34.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", ["models.py:mine", "a.module:mine", "torch", "torch:../x.py:mine", "nonsense"])
def test_a_case_of_this_folder_may_name_any_code(folder: Path, target: str) -> None:
    assert trusted(target, find_case("0123")) == target


@pytest.mark.parametrize(
    "place",
    ["elsewhere/.veriformer/ab12cd34.json", ".veriformer/deeper/ab12cd34.json", ".veriformer/0f0f0f0f.json",
     ".veriformer/../elsewhere/.veriformer/ab12cd34.json"],
)  # fmt: skip
@pytest.mark.parametrize("target", ["models.py:mine", "a.module:mine", "../torch:x.py:mine", "nonsense", ""])
def test_any_other_case_may_name_none(folder: Path, place: str, target: str) -> None:
    with pytest.raises(RecordError, match="which would be imported; if that is your code say so: --target"):
        trusted(target, find_case(place))
    assert trusted("torch:LayerNorm", find_case(place)) == "torch:LayerNorm"


@pytest.mark.parametrize("case", ["ffff", "../elsewhere/.veriformer/ab", "/etc/passwd", "*", "ab12cd34"])
def test_an_id_that_is_not_recorded_says_where_else_to_look(folder: Path, case: str) -> None:
    with pytest.raises(click.UsageError, match=r"no recorded case begins with .*; recorded are: 0123abcd, 0f0f0f0f. "
                       "Cases of a run with --out DIR lie in DIR/.veriformer: give the file"):  # fmt: skip
        find_case(case)


def test_the_command_names_what_is_not_trusted_by_itself(folder: Path) -> None:
    own, other = Path(".veriformer/0123abcd.json"), Path("elsewhere/.veriformer/ab12cd34.json")
    assert how_to_repeat(own, "m.py:mine") == {"again": "veriformer replay 0123abcd", "script": ""}
    assert how_to_repeat(other, "torch:LayerNorm")["again"] == f"veriformer replay {other}"
    other.with_suffix(".py").write_text("", encoding="utf-8")
    assert how_to_repeat(other, "my models.py:mine") == {
        "again": f"veriformer replay {other} --target 'my models.py:mine'",
        "script": "python elsewhere/.veriformer/ab12cd34.py",
    }


def test_a_recorded_case_cannot_lead_from_a_library_to_a_file(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "torch:").mkdir()
    (tmp_path / "x.py").write_text("open('ran', 'w').close()\nmine = 7\n", encoding="utf-8")
    settings = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": [], "call_seconds": 30.0, "named": []}
    case = {"target": "torch:/../x.py:mine", "property": "norm.definition", "choices": {}, "settings": {}}
    (tmp_path / "sent.json").write_text(json.dumps(case), encoding="utf-8")
    assert "its setting 'profile' is missing" in " ".join(veriformer("replay", "sent.json", status=3).stderr.split())
    (tmp_path / "sent.json").write_text(json.dumps({**case, "settings": settings}), encoding="utf-8")
    done = veriformer("replay", "sent.json", status=3)
    assert "torch has no subject '/../x.py:mine'" in " ".join(done.stderr.split())
    assert not (tmp_path / "ran").exists()


def test_what_is_printed_works_as_it_is_printed(veriformer: Run, tmp_path: Path) -> None:
    arguments = ("--profile", "quick", "-n", "1", "--only", "causality.first-token", "--out", "the report")
    done = veriformer("check", "models.py:twins", *arguments, status=1)
    again, scripts = (re.findall(rf"^  {word} +(.+)$", done.stdout, re.MULTILINE) for word in ("again", "script"))
    cases = sorted(p.name for p in (tmp_path / "the report" / ".veriformer").iterdir())
    assert len(set(again)) == len(set(scripts)) == 2, "two subjects that fail alike have a case each"
    assert len(cases) == 4
    program, *words = shlex.split(again[1])
    assert program == "veriformer"
    shown = veriformer(*words, status=1)
    assert "The first output is a function of the first input alone." in shown.stdout
    assert [again[1], scripts[1]] == re.findall(r"^  (?:again|script) +(.+)$", shown.stdout, re.MULTILINE)
    stored = veriformer("report", "the report/report.json", status=1)
    assert all(command in stored.stdout for command in (*again, *scripts))
    _, *words = shlex.split(scripts[1])
    alone = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (alone.returncode, "-> violated" in alone.stdout) == (1, True), alone.stderr
