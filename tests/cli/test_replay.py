"""Recorded cases: what may be loaded for them, and commands that work as they are printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from veriformer.cli.processes.asking import Pool
from veriformer.cli.recorded import find_case, how_to_repeat, trusted
from veriformer.properties.adapters.target import Target
from veriformer.reports.records import RecordError

Run = Callable[..., subprocess.CompletedProcess[str]]

SETTINGS = {"profile": "quick", "seed": 0, "device": "cpu", "dtypes": [], "call_seconds": 30.0, "named": []}
CASE: dict[str, Any] = {
    "schema": "veriformer-counterexample/1",
    "target": {"kind": "library", "place": "torch", "attribute": "LayerNorm", "index": None},
    "property": "norm.definition", "choices": {}, "settings": SETTINGS,
}  # fmt: skip


def _case(**changed: Any) -> str:
    return json.dumps({**CASE, **changed})


MALFORMED = {
    "deep": ("[" * 100_000, "nests its data too deeply"),
    "deep in an object": ('{"choices": ' + '{"a":' * 100_000, "nests its data too deeply"),
    "a number of thousands of digits": ('{"a": ' + "9" * 5000 + "}", "is no whole record (ValueError"),
    "NaN": (_case(settings={**SETTINGS, "call_seconds": float("nan")}), "holds nan, where a finite number is required"),
    "infinite": (_case().replace("30.0", "1e999"), "holds inf, where a finite number is required"),
    "null bytes": ("\0" * 100, "is truncated or was edited"),
    "no text": (b"\xff\xfe\x00", "is truncated or was edited"),
    "nothing": ("", "is truncated or was edited"),
    "a list": ("[]", "holds list, where a JSON object is required"),
    "a folder": (None, "there is no file"),
    "another schema": (_case(schema="other/9"),
                       "its 'schema' is 'other/9', where 'veriformer-counterexample/1' is required"),
    "no schema": ("{}", "its 'schema' is None, where 'veriformer-counterexample/1' is required"),
    "a huge seed": (_case(settings={**SETTINGS, "seed": 10**100}), "its setting 'seed' is 1000"),
    "no seed": (_case(settings={**SETTINGS, "seed": True}), "its setting 'seed' is True"),
    "a limit that is none": (_case(settings={**SETTINGS, "call_seconds": -1}), "its setting 'call_seconds' is -1"),
    "a headline that is none": (_case(headline=7), "its 'headline' is 7"),
    "a huge choice": (_case(choices={"T": 10**100}), "its choice 'T' is 1000"),
    "nested choices": (_case(choices={"T": [[1]]}), "its choice 'T' is [[1]]; it must be a number, a word or a list"),
    "a property of null bytes": (_case(property="\0"), "is not in this version's catalogue"),
}  # fmt: skip


def _write(content: str | bytes | None, path: Path) -> Path:
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_case_is_refused_in_one_sentence(name: str, veriformer: Run, tmp_path: Path) -> None:
    content, told = MALFORMED[name]
    _write(content, tmp_path / "sent.json")
    assert told in " ".join(veriformer("replay", "sent.json", status=3).stderr.split())


@pytest.mark.parametrize("name", ["deep", "deep in an object", "a number of thousands of digits", "infinite",
                                  "null bytes", "no text", "nothing", "a list", "no schema"])  # fmt: skip
def test_what_is_no_report_is_refused_in_one_sentence(name: str, veriformer: Run, tmp_path: Path) -> None:
    _write(MALFORMED[name][0], tmp_path / "sent.json")
    for command in ("report", "compare"):
        assert len(re.findall("^Error:", veriformer(command, "sent.json", status=3).stderr, re.MULTILINE)) == 1
        assert "Error:" in veriformer(command, str(tmp_path), status=3).stderr


def test_a_name_that_no_system_has_is_refused(veriformer: Run) -> None:
    for name in (f"{'x' * 5000}.json", "a\0b.json"):
        assert "Error:" in veriformer("replay", name, status=3).stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for place in (".veriformer/deeper", "elsewhere/.veriformer"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "ab12cd34.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".veriformer" / "0123abcd.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".veriformer" / "0f0f0f0f.json").symlink_to(tmp_path / "elsewhere/.veriformer/ab12cd34.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLACES = ["0123", "elsewhere/.veriformer/ab12cd34.json", ".veriformer/0f0f0f0f.json"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", ["models.py:mine", "a.module:mine", "../torch:x.py:mine", "many.py:several[3]"])
def test_no_case_may_name_code_wherever_it_lies(folder: Path, place: str, word: str) -> None:
    with pytest.raises(
        RecordError, match=r"no file is trusted to say so; if that is the code you mean say so yourself"
    ):
        trusted(Target.parse(word).to_record(), find_case(place))
    assert trusted(Target.parse("torch:LayerNorm").to_record(), find_case(place)) == "torch:LayerNorm"


@pytest.mark.parametrize(
    "recorded",
    ["torch:/../../x.py:mine", "torch:LayerNorm", "", None, 7, [], {}, {"kind": "library"},
     {"kind": "library", "place": "x.py", "attribute": "mine", "index": None},
     {"kind": "library", "place": "torch:/../x.py", "attribute": "mine", "index": None},
     {"kind": "module", "place": "torch", "attribute": "LayerNorm", "index": None},
     {"kind": "library", "place": "torch", "attribute": "LayerNorm", "index": 0},
     {"kind": "library", "place": ["torch"], "attribute": "LayerNorm", "index": None},
     {"kind": "file", "place": "m.py", "attribute": "mine", "index": True},
     {"kind": "library", "place": "torch", "attribute": "LayerNorm", "index": None, "run": "x"}],
)  # fmt: skip
def test_a_record_that_would_be_read_otherwise_than_it_says_names_nothing(folder: Path, recorded: object) -> None:
    with pytest.raises(RecordError, match="is no recorded case: the record names no target"):
        trusted(recorded, find_case("0123"))


@pytest.mark.parametrize("case", ["ffff", "../elsewhere/.veriformer/ab", "/etc/passwd", "*", "ab12cd34"])
def test_an_id_that_is_not_recorded_says_where_else_to_look(folder: Path, case: str) -> None:
    with pytest.raises(click.UsageError, match=r"no recorded case begins with .*; recorded are: 0123abcd, 0f0f0f0f. "
                       "Cases of a run with --out DIR lie in DIR/.veriformer: give the file"):  # fmt: skip
        find_case(case)


def test_the_command_names_what_is_not_trusted_by_itself(folder: Path) -> None:
    own, other = Path(".veriformer/0123abcd.json"), Path("elsewhere/.veriformer/ab12cd34.json")
    assert how_to_repeat(own, "m.py:mine") == {"again": "veriformer replay 0123abcd --target m.py:mine", "script": ""}
    assert how_to_repeat(own, "torch:LayerNorm") == {"again": "veriformer replay 0123abcd", "script": ""}
    assert how_to_repeat(Path("unwritten.json"), "torch:LayerNorm") == {"again": "", "script": ""}
    assert how_to_repeat(other, "torch:LayerNorm")["again"] == f"veriformer replay {other}"
    other.with_suffix(".py").write_text("", encoding="utf-8")
    assert how_to_repeat(other, "my models.py:mine") == {
        "again": f"veriformer replay {other} --target 'my models.py:mine'",
        "script": "python elsewhere/.veriformer/ab12cd34.py",
    }


def test_a_recorded_case_cannot_lead_from_a_library_to_a_file(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "torch:").mkdir()
    (tmp_path / "x.py").write_text("open('ran', 'w').close()\nmine = 7\n", encoding="utf-8")
    case = {**CASE, "target": {**CASE["target"], "attribute": "/../x.py:mine"}, "settings": {}}
    (tmp_path / "sent.json").write_text(json.dumps(case), encoding="utf-8")
    assert "its setting 'profile' is missing" in " ".join(veriformer("replay", "sent.json", status=3).stderr.split())
    (tmp_path / "sent.json").write_text(json.dumps({**case, "settings": CASE["settings"]}), encoding="utf-8")
    done = veriformer("replay", "sent.json", status=3)
    assert "torch has no subject '/../x.py:mine'" in " ".join(done.stderr.split())
    assert not (tmp_path / "ran").exists()


def test_what_is_printed_works_as_it_is_printed(veriformer: Run, tmp_path: Path) -> None:
    arguments = ("--profile", "quick", "-n", "1", "--only", "causality.first-token", "--out", "the report")
    done = veriformer("check", "models.py:twins", *arguments, status=1)
    again, scripts = (re.findall(rf"^  {word} +(.+)$", done.stdout, re.MULTILINE) for word in ("again", "script"))
    cases = sorted(p.name for p in (tmp_path / "the report" / ".veriformer").glob("[!.]*"))
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


VACUOUS = """
from veriformer.properties import Subject
wrong = True
mine = Subject(kind="softmax", forward=lambda m, x, dim=-1: x.softmax(0 if wrong else dim))
"""


def test_a_mended_subject_goes_on_where_its_record_ends(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "soft.py").write_text(VACUOUS, encoding="utf-8")
    veriformer("check", "soft.py:mine", "--profile", "quick", "-n", "1", "--only", "softmax.axis", status=1)
    (record,) = (tmp_path / ".veriformer").glob("*.json")
    (tmp_path / "soft.py").write_text(VACUOUS.replace("True", "False"), encoding="utf-8")
    mine = ("replay", record.stem, "--target", "soft.py:mine")
    assert "this case no longer fails: on its recorded inputs the property holds" in veriformer(*mine, status=0).stdout
    data = json.loads(record.read_text(encoding="utf-8"))
    label = next(iter(data["choices"]))
    record.write_text(json.dumps({**data, "choices": {**data["choices"], label: "four"}}), encoding="utf-8")
    assert f"the recorded {label} is 'four'" in " ".join(veriformer(*mine, status=3).stderr.split())


TWO_FAULTS = """
import torch
from torch import nn
from veriformer.properties import Subject

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        first, second = FIRST, SECOND
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        y = y * 1.1 if first else y
        return y * 1.1 if second and x.shape[1] > 5 else y

mine = Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x))
"""


@pytest.fixture
def two_faults(veriformer: Run, tmp_path: Path) -> Path:
    source = TWO_FAULTS.replace("FIRST", "True").replace("SECOND", "True")
    (tmp_path / "norm.py").write_text(source, encoding="utf-8")
    veriformer("check", "norm.py:mine", "--profile", "quick", "-n", "1", "--only", "norm.definition", status=1)
    (record,) = (tmp_path / ".veriformer").glob("*.json")
    return record


def test_the_very_case_is_judged_first_and_another_one_is_said_to_be_another(
    veriformer: Run, tmp_path: Path, two_faults: Path
) -> None:
    mine = ("replay", two_faults.stem, "--target", "norm.py:mine")
    same = veriformer(*mine, status=1).stdout
    assert "this case" not in same
    assert f"veriformer replay {two_faults.stem}" in same
    data = json.loads(two_faults.read_text(encoding="utf-8"))
    two_faults.write_text(json.dumps({**data, "headline": "the mean is not taken off"}), encoding="utf-8")
    assert "fails otherwise than when it was recorded; it was: the mean is" in veriformer(*mine, status=1).stdout
    # the record ends before the inputs are drawn: as where a fault shows at once, and is mended
    short = {name: value for name, value in data["choices"].items() if name in ("config", "dtype")}
    two_faults.write_text(json.dumps({**data, "choices": short}), encoding="utf-8")
    other = veriformer(*mine, status=1).stdout
    assert other.startswith("this case no longer fails; going on from it (")
    assert "`veriformer check norm.py:mine --only norm.definition` records" in " ".join(other.split())
    assert f"replay {two_faults.stem}" not in other


def test_a_case_that_shows_nothing_is_no_end_of_the_violation(
    veriformer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sent.json").write_text(json.dumps(CASE), encoding="utf-8")

    def ask(pool: Pool, question: str, **arguments: Any) -> dict[str, Any]:
        result = {"outcome": "VACUOUS", "reason": "its premise held 0 times in 1 examples: nothing was shown"}
        return {"properties": []} if question == "describe" else {"result": result}

    monkeypatch.setattr(Pool, "ask", ask)
    done = veriformer("replay", "sent.json", status=2)
    assert "norm.definition: VACUOUS its premise held 0 times" in done.stdout
    assert "no longer fails" not in done.stdout
