"""`veriformer check` as a person meets it: what right and broken models, and broken input, look like."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ("--profile", "quick", "-n", "1")


def test_a_right_model_passes(veriformer: Run) -> None:
    done = veriformer("check", "models.py:right", *QUICK, "--only", "causality", "--only", "numerics", status=0)
    assert re.match(r"✓ right  \d+ pass of \d+ applicable \(\d+ in the catalogue\), power 5/5\n", done.stdout)
    assert "Traceback" not in done.stderr


def test_a_failure_fits_one_screen(veriformer: Run, tmp_path: Path) -> None:
    done = veriformer("check", "models.py:leaky", *QUICK, "--only", "causality.no-future-influence", status=1)
    screen = done.stdout[done.stdout.index("causality.no-future-influence  ─") :]
    shown = re.sub(r"(seed|real)=\d+|-?\d+\.\d+(e[+-]\d+)?|index \[[\d, ]+\]|[0-9a-f]{8}", "#", screen)
    expected = (Path(__file__).parent / "failure.txt").read_text(encoding="utf-8")
    assert [line.rstrip() for line in shown.splitlines()] == expected.splitlines()
    (script,) = (tmp_path / ".veriformer").glob("*.py")
    assert (tmp_path / ".veriformer" / ".gitignore").read_text() == "*\n"
    assert str(tmp_path) not in script.read_text()
    runs = f"import sys, runpy; sys.modules['veriformer'] = None; runpy.run_path({str(script)!r}, run_name='__main__')"
    alone = subprocess.run([sys.executable, "-c", runs], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert alone.returncode == 1, alone.stderr
    assert "-> violated" in alone.stdout
    (tmp_path / "models.py").write_text((tmp_path / "models.py").read_text().replace("gpt(2)", "gpt(1)"))
    mended = subprocess.run([sys.executable, "-c", runs], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert mended.returncode == 0, mended.stderr
    assert "-> holds" in mended.stdout


def test_replay_shows_the_failure_again_and_its_end(veriformer: Run, tmp_path: Path) -> None:
    veriformer("check", "models.py:leaky", *QUICK, "--only", "causality.prefix-consistency", status=1)
    (record,) = (tmp_path / ".veriformer").glob("*.json")
    mine = ("--target", "models.py:leaky")
    again = veriformer("replay", record.stem[:4], *mine, status=1)
    assert "The outputs for a prefix are the first outputs for the whole sequence." in again.stdout
    (tmp_path / "models.py").write_text((tmp_path / "models.py").read_text().replace("gpt(2)", "gpt(1)"))
    assert "this case no longer fails" in veriformer("replay", str(record), *mine, status=0).stdout
    data = json.loads(record.read_text())
    record.write_text(json.dumps({**data, "choices": {**data["choices"], "T": "__import__('os')"}}))
    edited = veriformer("replay", record.stem, *mine, status=3)
    assert "the recorded T is \"__import__('os')\"; it must be one of" in " ".join(edited.stderr.split())
    record.write_text(record.read_text()[:40])
    assert "is truncated or was edited" in veriformer("replay", record.stem, status=3).stderr


def test_json_alone_on_standard_output(veriformer_alone: Run, tmp_path: Path) -> None:
    done = veriformer_alone(
        "check",
        "models.py:leaky",
        *QUICK,
        "--only",
        "causality.no-future-influence",
        "--format",
        "json",
        "--out",
        "report",
        status=1,
    )
    report = json.loads(done.stdout)
    assert report["schema"] == "veriformer-report/1"
    (subject,) = report["subjects"]
    assert subject["name"] == "leaky"
    failed = [r for r in subject["results"] if r["outcome"] == "FAIL"]
    assert {"id", "outcome", "reason", "margin", "examples", "witnesses", "paths", "counterexample"} <= set(failed[0])
    assert "off by one" in failed[0]["counterexample"]["cause"]
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("unbuildable", 2, "build raised ZeroDivisionError: division by zero (for d_model=8"),
        ("uncallable", 2, "the model is object, which cannot be called; give the subject a forward"),
        ("tuples", 2, "forward returned a tuple, where one tensor is required"),
        ("flat", 2, "forward returned shape [2, 40] for inputs [2, 5, 8]; a layer returns [2, 5, 8] here"),
        ("integers", 2, "forward returned torch.int64 where floating point numbers are required"),
        ("recursive", 2, "the subject raised RecursionError (called with [2, 5, 8] float32)"),
        ("crashing", 2, "the process was ended by SIGSEGV while the subject was judged"),
        ("greedy", 2, "the subject raised RuntimeError"),
        ("nan", 1, "an ordinary input gives NaN or infinity"),
        ("mutating", 1, "the call changed the caller's tensor"),
        ("one_length", 1, "the subject raised ValueError: sequences of one token are not supported"),
    ],
)
def test_broken_subjects_get_one_sentence(veriformer: Run, target: str, status: int, said: str) -> None:
    only = ("--only", "numerics", *(("--only", "causality") if target == "one_length" else ()))
    done = veriformer("check", f"models.py:{target}", *QUICK, *only, "--max-memory", "4", status=status)
    assert said in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "✓" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nosuch.py:x"], 3, "there is no file 'nosuch.py'; give the path of a Python file, then :attribute"),
        (["models.py:leeky"], 3, "models.py has no attribute 'leeky'; did you mean 'leaky'?"),
        (["models"], 3, "'models' is no target; give package.module:attribute"),
        (["models.py:number"], 2, "'int' is not recognised; say what it is: Subject(kind=..., build="),
        (["models.py:broken_factory"], 2, "and raised RuntimeError: no weights here (models.py, line"),
        (["torch:Softmox"], 3, "torch has no subject 'Softmox'"),
        (["models.py:right", "--only", "softmax.simplx"], 3, "did you mean 'softmax.simplex'?"),
        (["models.py:right", "--device", "cuda:9"], 3, "device was 'cuda:9'"),
        (["models.py:right", "--deviations", "none.toml"], 3, "there is no deviations file none.toml"),
        ([], 3, "Missing argument 'TARGET...'"),
    ],
)
def test_wrong_words_get_one_sentence(veriformer: Run, arguments: list[str], status: int, said: str) -> None:
    done = veriformer("check", *arguments, "-n", "1", status=status)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_what_nothing_applies_to_gets_no_tick_but_the_reason(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "opt.py").write_text(
        "from torch import nn\nfrom veriformer.properties import Subject\nnet = nn.Linear(4, 4)\n"
        "mine = Subject(kind='parameter_groups', name='mine', module=net, forward=lambda m: [{'params': []}])\n"
    )
    for beside in ((), ("torch:softmax",)):
        done = veriformer("check", "opt.py:mine", *beside, *QUICK, "--only", "softmax.axis", "--only", "schedule",
                          "--out", "out", status=2)  # fmt: skip
        again = veriformer("report", "out/report.json", status=2)
        for told in (done.stdout, again.stdout):
            assert told.startswith("- mine  nothing judged: the subject offers no build")
            assert told.count("✓") == len(beside)
    every = veriformer("check", "opt.py:mine", *QUICK, "--only", "softmax.axis", "-v", status=2).stdout
    assert "- mine  nothing judged: no property of this run speaks of parameter_groups" in every
    assert "    softmax.axis: speaks of softmax, not of parameter_groups" in every


def test_a_hang_costs_a_timeout(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(
        "import time\nfrom veriformer.properties import Subject\n"
        "def forward(m, x):\n    while True:\n        time.sleep(0.05)\n"
        "hangs = Subject(kind='layer', forward=forward)\n"
    )
    done = veriformer("check", "models.py:hangs", *QUICK, "--only", "numerics", "--call-seconds", "1", status=2)
    assert "TIMEOUT" in done.stdout
    assert "one call of the subject took longer than 1 s" in done.stdout


def test_list_and_explain(veriformer: Run) -> None:
    listed = json.loads(veriformer("list", "--format", "json", status=0).stdout)
    assert {"id", "level", "kinds", "statement"} <= set(listed[0])
    assert "properties, " in veriformer("list", status=0).stdout
    shown = veriformer("explain", "causality.no-future-gradient", status=0).stdout
    assert "formula   d f(x)_t / d x_s = 0  <=>  s > t" in shown
    assert "catches   CM01" in shown


def test_deviations_are_declared_with_a_reason(veriformer: Run, tmp_path: Path) -> None:
    entry = '[[deviation]]\nproperty = "causality.first-token"\nsubject = "leaky"\nreason = "a teaching example"\n'
    (tmp_path / "known.toml").write_text(entry)
    arguments = ("check", "models.py:leaky", *QUICK, "--only", "causality.first-token", "--deviations", "known.toml")
    done = veriformer(*arguments, status=0)
    assert "DEVIATION       causality.first-token: a teaching example" in done.stdout
    done = veriformer(*(a.replace("leaky", "right") for a in arguments), status=3)
    assert "is about 'leaky', which is not in this run; the subjects are: right, models.py:right" in done.stderr
    (tmp_path / "known.toml").write_text(entry.replace('"leaky"', '"r*"'))
    done = veriformer(*(a.replace("leaky", "right") for a in arguments), status=1)
    assert "declared as a deviation (a teaching example) and holds: remove the entry" in done.stdout
    for wrong, said in (
        (entry.replace("reason", "reasn"), "an entry has the key 'reasn'; did you mean 'reason'?"),
        (entry.replace("first-token", "first-tokn"), "there is no property 'causality.first-tokn'; did you mean"),
        (entry + "expires = 2020-01-01\n", "expired on 2020-01-01; look at it again"),
        ("[[deviation", "is no TOML"),
    ):
        (tmp_path / "known.toml").write_text(wrong)
        assert said in veriformer(*arguments, status=3).stderr
