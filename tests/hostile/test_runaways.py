"""Subjects that start, fill, open and write without end: each is ended with one sentence, and nothing of it is left.

Each of `runaways/` is bounded: what it starts ends by itself, and is a few dozen times what the limits of this test
allow. Limits are told apart from the real ones, so that the machine is not filled.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hostile.test_subjects import Report, judged, row, says_what_is_expected
from veriformer.cli.processes import asking
from veriformer.cli.processes.limits import Limits
from veriformer.cli.processes.watching import below, end_below, excess

RUNAWAYS = sorted((Path(__file__).parent / "runaways").glob("*.py"))
GOOD = ("torch:softmax", "good.py:many[0]")


@pytest.fixture(scope="module")
def beside(once: Callable[[str, Callable[[Path], None]], Path], copies: None) -> Report:
    """Judge all of them in one run, good ones between them."""

    def judge(place: Path) -> None:
        for file in (*RUNAWAYS, Path(__file__).parent / "good.py"):
            shutil.copy(file, place)
        hostile = [f"{file.name}:mine" for file in RUNAWAYS]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            patch.setattr(asking, "Limits", functools.partial(Limits, processes=12, files=200, written_gib=0.02))
            patch.setattr(asking, "FALLS", 1)
            judged(place, *hostile[:5], *GOOD, *hostile[5:], call_seconds="30", memory="1.2")

    return json.loads((once("runaways", judge) / "report" / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", RUNAWAYS, ids=lambda f: f.stem)
def test_each_is_ended_with_a_sentence(beside: Report, file: Path) -> None:
    says_what_is_expected(row(beside, f"{file.name}:mine"), file)


def test_nothing_of_them_is_left(beside: Report) -> None:
    for process in psutil.process_iter():
        try:
            told = " ".join(process.cmdline())
        except psutil.Error:
            continue
        assert "left behind by a runaway" not in told


def test_the_good_ones_do_not_notice(beside: Report) -> None:
    for target in GOOD:
        outcomes = {r["outcome"] for r in row(beside, target)["results"]}
        assert outcomes <= {"PASS", "NOT_APPLICABLE"}


FOUR = """
import os, time
for _ in range(3):
    if not os.fork():
        os.setsid()
        break
kept = bytearray(b"x") * (40 * 2**20)
os.write(1, bytes(2**17) if kept else b"")
time.sleep(60)
"""


def test_what_is_started_is_counted_and_ended_whatever_it_does() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", FOUR], stdout=subprocess.PIPE)
    first, taken = process.pid, 0
    assert process.stdout is not None
    while taken < 4 * 2**17:
        taken += len(process.stdout.read1(2**16))
    assert len(below(first)) == 3
    assert [excess(limits, first) for limits in (
        Limits(), Limits(processes=2), Limits(memory_gib=0.1), Limits(memory_gib=0), Limits(written_gib=0.0003))
    ] == [0, 1, 2, 0, 3]  # fmt: skip
    there = [psutil.Process(pid) for pid in below(first)]
    end_below(first)
    process.kill()
    process.communicate()
    psutil.wait_procs(there, timeout=10)
    assert not [process for process in there if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_a_limit_is_told_in_words() -> None:
    assert Limits(processes=9).sentence(1) == "was ended for starting more than 9 others at a time"
    assert Limits(memory_gib=2).sentence(2).startswith("was ended for filling more than 2 GiB of memory")
    assert Limits(written_gib=0.5).sentence(3).startswith("was ended for writing more than 0.5 GiB")
    assert [Limits().exceeded(64, 2**33, 2**32), Limits().exceeded(65, 0, 0), Limits().exceeded(0, 2**33 + 1, 0)] == [
        0, 1, 2]  # fmt: skip
