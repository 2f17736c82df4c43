"""A subject has processes and a group of its own: it may start some, and what it sends to its group is for itself."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from hostile.running import run
from veriformer.cli.processes import asking

POOLS = """
import atexit, multiprocessing, os, signal
from concurrent.futures import ProcessPoolExecutor
import torch
from torch.utils.data import DataLoader
from veriformer.properties import Subject

fork = multiprocessing.get_context("fork")
pool = ProcessPoolExecutor(1, mp_context=fork)
there = pool.submit(os.getpid).result()
other = fork.Pool(1)
others = other.apply(os.getpid)

def ten(i):
    return 2.0

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return 2.0

factor = sum(float(x) for x in DataLoader(Numbers(), num_workers=1, batch_size=None)) / 2
print("children", there, others)

def forward(model, x):
    assert pool.submit(os.getpid).result() == there
    return x * factor

mine = Subject(kind="layer", forward=forward, declares={"causal": True})
"""
SIGNALS = """
import os, signal, subprocess, sys
from veriformer.properties import Subject

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: None)

def forward(model, x):
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(0, number)
        os.killpg(os.getpgid(0), number)
    return x * 2

mine = Subject(kind="layer", forward=forward, declares={"causal": True})
"""
DIES = SIGNALS.replace("lambda number, frame: None", "signal.SIG_DFL").replace("SIGHUP, ", "SIGINT, ")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "FALLS", 1)


def test_a_right_model_that_starts_processes_is_judged_and_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "pools.py").write_text(POOLS)
    told = run(
        "check", "pools.py:mine", "--profile", "quick", "-n", "1", "--only", "numerics.finite", "--format", "json"
    )
    assert told.status == 0, told
    (subject,) = json.loads(told.out)["subjects"]
    assert [r["outcome"] for r in subject["results"]] == ["PASS"]
    words = next(line for line in subject["printed"]["text"].splitlines() if line.startswith("children")).split()[1:]
    assert len(words) == 2
    assert not any(psutil.pid_exists(int(word)) for word in words)


def test_what_a_subject_sends_to_its_group_reaches_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "signals.py").write_text(SIGNALS)
    (tmp_path / "dies.py").write_text(DIES)
    told = run("check", "signals.py:mine", "dies.py:mine", "torch:softmax", "--profile", "quick", "-n", "1", "--only",
               "numerics.finite", "--only", "softmax.simplex", "--format", "json")  # fmt: skip
    assert told.err == ""
    outcomes = {
        s["target"]: [r["outcome"] for r in s["results"] if r["outcome"] != "NOT_APPLICABLE"]
        for s in json.loads(told.out)["subjects"]
    }
    assert outcomes["signals.py:mine"] == ["PASS"]
    assert outcomes["dies.py:mine"] == ["ERROR", "BLOCKED"] or outcomes["dies.py:mine"] == ["ERROR"]
    assert outcomes["torch:softmax"] == ["PASS", "PASS"]
