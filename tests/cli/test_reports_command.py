"""check --out, report, compare, deviations and sweep, as a person runs them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


CHECK = ("check", "models.py:leaky", "--profile", "quick", "--stable", "-n", "1")
_REPORTED: list[Path] = []


@pytest.fixture
def checked(veriformer: Run, tmp_path: Path) -> Path:
    """Return a folder with the report of a check, which is made once and copied."""
    if not _REPORTED:
        assert veriformer(*CHECK, "--only", "causality", "--out", "out").returncode == 1
        _REPORTED.append(tmp_path / "out")
    else:
        shutil.copytree(_REPORTED[0], tmp_path / "out")
    return tmp_path


def test_every_form_is_written_and_shown_again(veriformer: Run, checked: Path) -> None:
    names = {p.name for p in (checked / "out").iterdir() if p.is_file()}
    assert names == {"report.json", "report.html", "report.md", "junit.xml", "badge.svg"}
    again = veriformer("report", "out/report.json", "--format", "markdown")
    assert again.returncode == 1
    assert "**fail** `models.py:leaky` causality.no-future-influence" in again.stdout
    assert "diagonal is off by one" in veriformer("report", "out/report.json").stdout
    assert (
        json.loads(veriformer("report", "out/report.json", "--format", "json").stdout)["schema"]
        == "veriformer-report/1"
    )


def test_two_runs_give_the_same_bytes(veriformer: Run, tmp_path: Path) -> None:
    for folder in ("once", "again"):  # its name stands in the commands that show a case again
        veriformer(*CHECK, "--only", "causality.prefix-consistency", "--out", "out", status=1)
        (tmp_path / "out").rename(tmp_path / folder)
    for name in ("report.json", "report.html", "report.md", "junit.xml", "badge.svg"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


def test_compare_tells_what_got_worse(veriformer: Run, checked: Path) -> None:
    better = json.loads((checked / "out" / "report.json").read_text())
    for result in better["subjects"][0]["results"]:
        if result["outcome"] == "FAIL":
            result.update(outcome="PASS", reason="", counterexample=None)
    (checked / "better.json").write_text(json.dumps(better))
    assert veriformer("compare", "out/report.json", "better.json").returncode == 0
    worse = veriformer("compare", "better.json", "out/report.json")
    assert worse.returncode == 1
    assert "PASS in better.json, FAIL in out/report.json" in worse.stdout
    assert veriformer("compare", "better.json", "out/report.json", "--format", "json").returncode == 1


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is truncated or was edited"),
        ("[]", "where a JSON object is required"),
        ("{}", ""),
        (None, "there is no file"),
    ],
)
def test_what_is_no_report_gets_one_sentence(
    veriformer: Run, tmp_path: Path, command: str, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / "bad.json").write_text(text)
    found = veriformer(command, "bad.json")
    assert found.returncode == 3
    assert told in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stderr.count("Error:") == 1


NORM = """
from torch import nn
from veriformer.properties import Subject
scaled = Subject(kind="norm", build=lambda c: nn.LayerNorm(c.d_model), forward=lambda m, x: 1.1 * m(x))
"""


def test_deviations_are_recorded_held_and_pruned(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "norm.py").write_text(NORM)
    call = ("check", "norm.py:scaled", "--profile", "quick", "-n", "1", "--deviations", "known.toml")
    first = veriformer(*call, "--update-deviations", "--reason", "a joke")
    assert first.returncode == 0, first.stdout
    assert "entries added to known.toml" in first.stderr
    assert 'reason = "a joke"' in (tmp_path / "known.toml").read_text()
    assert veriformer(*call).returncode == 0
    (tmp_path / "norm.py").write_text(NORM.replace("1.1 * ", ""))
    assert "UNEXPECTED_PASS" in veriformer(*call).stdout
    pruned = veriformer(*call, "--prune")
    assert pruned.returncode == 0
    assert "[[deviation]]" not in (tmp_path / "known.toml").read_text()


ASYMMETRIC = """
import torch
from torch import nn
from veriformer.properties import Subject

class Windowed(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))

mine = Subject(kind="decoder", build=lambda c: Windowed(c.vocab_size, c.d_model), forward=lambda m, x: m(x))
"""


def test_an_open_question_is_recorded_held_and_pruned_once_it_is_answered(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "windowed.py").write_text(ASYMMETRIC)
    call = ("check", "windowed.py:mine", "--profile", "quick", "-n", "1", "--only",
            "causality.no-future-gradient", "--deviations", "known.toml")  # fmt: skip
    done = veriformer(*call, "--update-deviations", status=0)
    assert "1 deviation" in done.stdout
    assert "1 entry added to known.toml; write the reason of each" in done.stderr
    assert "1 holds an open question: declare " in done.stderr
    assert 'outcome = "open"' in (tmp_path / "known.toml").read_text()
    late = veriformer(*call, "--update-deviations", "--reason", "a teaching example", status=0)
    assert "0 entries added to known.toml, 1 changed\n" in late.stderr
    assert ": a teaching example" in late.stdout
    other = veriformer(*call, "--update-deviations", "--reason", "another", status=0)
    assert "; 1 entry has a reason, which stays: change it in the file" in other.stderr
    assert veriformer(*call, "--prune", status=0).stderr.count("0 entries removed") == 1
    (tmp_path / "windowed.py").write_text(
        ASYMMETRIC.replace("forward=lambda", "declares={'sparse': True}, forward=lambda")
    )
    veriformer(*call, status=1)
    assert "1 entry removed" in veriformer(*call, "--prune", status=0).stderr


def test_prune_takes_out_what_was_judged_whatever_the_project_selects(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "norm.py").write_text(NORM.replace("1.1 * ", ""))
    entry = '[[deviation]]\nproperty = "{}"\nsubject = "norm.py:scaled"\nreason = "x"\n'
    kept = entry.format("norm.jacobian")
    (tmp_path / "known.toml").write_text(entry.format("norm.definition") + kept)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.veriformer]\nsubjects = "norm.py:scaled"\nonly = ["norm.definition"]\ndeviations = "known.toml"\n'
    )
    done = veriformer("check", "--profile", "quick", "-n", "1", "--prune", status=0)
    told = "1 entry removed from known.toml; 1 entry stays, since this run left them out ("
    assert f"{told}only = norm.definition of pyproject.toml)" in done.stderr
    assert (tmp_path / "known.toml").read_text() == kept


def test_a_file_of_deviations_that_is_missing_is_named_with_what_names_it(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.veriformer]\ndeviations = "none.toml"\n')
    told = ("there is no deviations file none.toml; mend its name, or run `veriformer check` on your target once with "
            "--update-deviations, which writes what fails now into it\n")  # fmt: skip
    done = veriformer("check", "torch:softmax", status=3)
    assert f"Error: deviations of pyproject.toml: {told}" in done.stderr
    call = ("check", "torch:softmax", "--profile", "quick", "-n", "1", "--only", "softmax.axis")
    assert f"Error: {told}" in veriformer(*call, "--deviations", "none.toml", status=3).stderr
    assert "0 entries added to none.toml: nothing fails" in veriformer(*call, "--update-deviations", status=0).stderr
    assert veriformer(*call, status=0).stderr.count("Error") == 0


@pytest.mark.parametrize("place", [("--out", "out"), ()])
def test_commands_in_a_junit_file_work_from_where_one_stands(
    veriformer: Run, tmp_path: Path, place: tuple[str, ...]
) -> None:
    done = veriformer(*CHECK, "--only", "causality.first-token", *place, "--format", "junit", status=1)
    text = (tmp_path / "out" / "junit.xml").read_text() if place else done.stdout
    (told,) = {case.text for case in ElementTree.fromstring(text).iter("failure") if case.text}
    again, script = (shlex.split(command) for command in re.findall("^(?:again|script): (.*)", told, re.MULTILINE))
    assert again[0] == "veriformer"
    assert "violated" not in veriformer(*again[1:], status=1).stderr
    ended = subprocess.run([sys.executable, *script[1:]], capture_output=True, text=True, check=False)
    assert (ended.returncode, "-> violated" in ended.stdout) == (1, True), ended.stderr


def test_options_about_deviations_that_do_not_go_together(veriformer: Run) -> None:
    assert "need --deviations FILE" in veriformer("check", "reference:softmax", "--prune").stderr
    assert "give --update-deviations too" in veriformer("check", "reference:softmax", "--reason", "x").stderr


def test_an_entry_about_another_subject_is_refused_with_the_nearest(veriformer: Run, tmp_path: Path) -> None:
    entry = '[[deviation]]\nproperty = "causality.first-token"\nsubject = "models.py:leeky"\nreason = "x"\n'
    (tmp_path / "known.toml").write_text(entry)
    found = veriformer("check", "models.py:leaky", "--only", "causality", "--deviations", "known.toml")
    assert found.returncode == 3
    assert "did you mean 'models.py:leaky'" in " ".join(found.stderr.split())


def test_a_case_from_elsewhere_imports_nothing(veriformer: Run, checked: Path) -> None:
    case = next((checked / "out" / ".veriformer").glob("*.json"))
    record = json.loads(case.read_text())
    (checked / "evil.py").write_text("open('ran', 'w').close()\nmine = 7\n")
    (checked / "sent.json").write_text(
        json.dumps({**record, "target": {**record["target"], "place": "evil.py", "attribute": "mine"}})
    )
    refused = veriformer("replay", "sent.json")
    assert refused.returncode == 3
    assert "--target evil.py:mine" in " ".join(refused.stderr.split())
    assert not (checked / "ran").exists()
    (checked / "sent.json").write_text(json.dumps({**record, "settings": {"profile": "__import__('os')"}}))
    assert "its setting 'profile'" in " ".join(
        veriformer("replay", "sent.json", "--target", "models.py:leaky").stderr.split()
    )
    (checked / "sent.json").write_text(json.dumps(record))
    assert veriformer("replay", "sent.json", "--target", "models.py:leaky").returncode == 1


def test_a_sweep_tables_goes_on_and_survives_a_model_that_cannot_be_built(veriformer: Run, tmp_path: Path) -> None:
    call = ("sweep", "reference:softmax", "torch:LayerNorm", "--out", "swept", "-n", "2")
    first = veriformer(*call)
    assert first.returncode == 0, first.stderr
    assert "2 models of 2 libraries: 2 pass." in first.stdout
    names = {p.name for p in (tmp_path / "swept").iterdir()}
    assert names == {"report.json", "compliance.md", "compliance.html", "compliance.csv", "judged.jsonl"}
    again = veriformer(*call)
    assert "2 of 2 models were judged before" in again.stderr
    assert again.stdout == first.stdout
    assert "there is no library 'nothing'" in veriformer("sweep", "nothing").stderr
