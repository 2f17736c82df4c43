"""A run that is killed, and two runs at once in one folder, leave whole files; which moment it is never matters."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hostile.samples import REPORT
from veriformer.reports.formats import write_all
from veriformer.reports.schema import read_report

MODEL = """
from torch import nn
from veriformer.properties import Subject
wrong = Subject(kind="norm", name="wrong", build=lambda c: nn.LayerNorm(c.d_model), forward=lambda m, x: 1.1 * m(x))
"""
MAIN = [sys.executable, "-c", "from veriformer.cli.main import main; main()"]
CHECK = [*MAIN, "check", "m.py:wrong", "--profile", "quick", "-n", "1", "--only", "norm", "--out", "out"]
SWEEP = [*MAIN, "sweep", "torch:softmax", "reference:softmax", "--level", "core", "-n", "1", "--out", "out"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.py").write_text(MODEL)
    return tmp_path


def _begun(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            start_new_session=True)  # fmt: skip


def _kill(running: subprocess.Popen[bytes]) -> None:
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()


def _whole(folder: Path) -> int:
    """Insist that every file that has its name is whole, and return how many there are."""
    count = 0
    for path in folder.rglob("*"):
        if not path.is_file() or path.name.startswith(".") or path.suffix == ".jsonl":
            continue  # what begins with a dot was being written, and has not got its name
        text = path.read_text(encoding="utf-8")
        count += 1
        if path.name == "report.json":
            read_report(path)
        elif path.suffix == ".json":
            json.loads(text)
        elif path.suffix in (".xml", ".svg"):
            ElementTree.fromstring(text)
        elif path.suffix == ".html":
            assert text.rstrip().endswith("</html>")
        elif path.suffix == ".py":
            compile(text, str(path), "exec")
    return count


WRITER = """
import itertools, json, sys
from pathlib import Path
from veriformer.reports.formats import write_all
for number in itertools.count():
    write_all({**json.loads(sys.argv[1]), "seed": number}, Path("out"))
    print(number, flush=True)
"""


@pytest.mark.parametrize("moment", [0.0, 0.03, 0.1])
def test_a_kill_while_reports_are_written_leaves_whole_ones(moment: float, folder: Path) -> None:
    running = subprocess.Popen([sys.executable, "-c", WRITER, json.dumps(REPORT)], cwd=folder, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    time.sleep(moment * random.random())  # any moment will do: nothing that follows depends on it
    running.kill()
    running.communicate()
    assert _whole(folder / "out") == 5


def test_a_kill_of_a_check_leaves_what_a_second_run_goes_by(folder: Path) -> None:
    write_all(REPORT, folder / "out")  # of an earlier run
    for _ in range(2):
        running = _begun(CHECK, folder)
        time.sleep(4 * random.random())
        _kill(running)
        assert _whole(folder / "out") >= 5
    assert subprocess.run(CHECK, cwd=folder, capture_output=True, check=False).returncode == 1
    assert read_report(folder / "out" / "report.json")["subjects"][0]["name"] == "wrong"


def test_a_kill_of_a_sweep_costs_no_row_that_was_judged(folder: Path) -> None:
    rows = folder / "out" / "judged.jsonl"
    running = _begun([*SWEEP, "--fresh"], folder)
    while not (rows.exists() and b"\n" in rows.read_bytes()) and running.poll() is None:
        time.sleep(0.02)  # a file without a whole line holds no row yet
    _kill(running)
    before = rows.read_bytes()
    done = subprocess.run(SWEEP, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "of 2 models were judged before" in done.stderr
    assert rows.read_bytes().startswith(before)
    assert _whole(folder / "out") == 4


@pytest.mark.parametrize("command", [CHECK, SWEEP], ids=["check", "sweep"])
def test_two_runs_at_once_in_one_folder_end_as_one_does(command: list[str], folder: Path) -> None:
    both = [_begun(command, folder) for _ in range(2)]
    told = [running.communicate()[1].decode() for running in both]
    assert {running.returncode for running in both} == {1 if command is CHECK else 0}, told
    assert _whole(folder) > 4
    if command is SWEEP:
        lines = [json.loads(line) for line in (folder / "out" / "judged.jsonl").read_text().splitlines() if line]
        assert {line["id"] for line in lines} == {"torch:softmax", "reference:softmax"}
