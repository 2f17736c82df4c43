"""The pytest door, tried from a scratch project against the built wheel; and that it is inert otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from veriformer.properties import Subject, parametrize
from veriformer.properties.judging.catalogue import select

PytestIn = Callable[..., str]

MODEL = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, d_model, num_heads, diagonal=1):
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.diagonal = diagonal

    def forward(self, x):
        blocked = torch.ones(x.shape[1], x.shape[1]).triu(self.diagonal).bool()
        return x + self.attention(x, x, x, attn_mask=blocked, need_weights=False)[0]


class Leaky(Layer):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads, diagonal=2)
"""
TESTS = """
from veriformer.properties import parametrize
from model import Layer, Leaky
test_layer = parametrize(Layer, causal=True, profile="quick")
test_leaky = parametrize(Leaky, causal=True, profile="quick")


def test_the_wheel_is_what_is_tested():
    import veriformer.properties
    assert "installed" in veriformer.properties.__file__
"""
HYPOTHESIS = """
from hypothesis import given, settings, strategies as st


@given(st.integers())
@settings(max_examples=30, derandomize=True, database=None)
def test_fails(n):
    assert n < 100


@given(st.lists(st.floats(allow_nan=False)))
@settings(derandomize=True, database=None)
def test_passes(xs):
    assert sorted(sorted(xs)) == sorted(xs)
"""


@pytest.fixture
def pytest_in(installed: Path, tmp_path: Path) -> PytestIn:
    """Return a function that runs pytest in a scratch project, where the wheel is installed and not this checkout."""
    (tmp_path / "model.py").write_text(MODEL)
    path = os.pathsep.join([str(installed), str(tmp_path)])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HYPOTHESIS", "CI"))}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        return done.stdout + done.stderr

    return run


def test_two_lines_in_a_test_file(pytest_in: PytestIn, tmp_path: Path) -> None:
    (tmp_path / "test_model.py").write_text(TESTS)
    output = pytest_in("-q")
    failed = set(re.findall(r"FAILED test_model\.py::(\S+)", output))
    assert "test_leaky[causality.no-future-gradient]" in failed
    families = ("test_leaky[causality.", "test_leaky[anatomy.mask]")
    assert all(name.startswith(families) for name in failed), output
    assert "influence exactly one step ahead: the mask's diagonal is off by one" in " ".join(output.split())
    assert "            ■ allowed  x illegal  o missing  · none" in output, "the influence map of the command"
    assert "  again     pytest 'test_model.py::test_leaky[causality.no-future-gradient]'" in output
    scripts = re.findall(r"  script    python (\S+)", output)
    assert scripts
    assert all((tmp_path / script).is_file() for script in scripts)
    assert "Traceback" not in output
    assert "parametrizing.py" not in output, "the failure must not lead through this package"


def test_whole_subjects_go_to_the_workers(pytest_in: PytestIn, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    subjects = ("--subject", "torch:softmax", "--veriformer", "reference:softmax")
    few = ("--veriformer-profile=quick", "--veriformer-only=softmax.simplex", "--veriformer-only=softmax.order")
    output = pytest_in("-v", "-n", "2", *subjects, *few)
    ran = re.findall(r"\[(gw\d)\].* PASSED (\S+softmax)::(softmax\.\w+)", output)
    assert len({(worker, subject) for worker, subject, _ in ran}) == 2, output
    assert len(ran) == 4
    assert "2 subjects, 4 pass; canaries 1/1; profile quick, seed 0, cpu" in output
    assert re.search(r"5 passed", output), output


MARKED = {
    "softmax": lambda p: p.family == "softmax",
    "core": lambda p: p.level == "core",
    "not core and not extended": lambda p: False,
    "softmax and extended": lambda p: p.family == "softmax" and p.level == "extended",
}


@pytest.mark.parametrize("chosen", MARKED)
def test_level_and_family_are_marks(chosen: str, tmp_path: Path) -> None:
    lines = ("import torch", "from veriformer.properties import parametrize",
             'test_mine = parametrize(torch.softmax, kind="softmax")')  # fmt: skip
    (tmp_path / "test_mine.py").write_text("\n".join(lines))
    collected = _Collected()
    arguments = ("--strict-markers", "--collect-only", "-qq", "-m", chosen, "-c", os.devnull, "--rootdir",
                 str(tmp_path), "--import-mode=importlib")  # fmt: skip
    pytest.main([*arguments, str(tmp_path)], plugins=[collected])
    wanted = [p.id for p in select() if "softmax" in p.kinds and MARKED[chosen](p)]
    assert sorted(collected.names) == sorted(f"test_mine[{i}]" for i in wanted)


class _Collected:
    """The names of the tests that are left once -m has chosen."""

    names: list[str]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


def test_several_subjects_stand_in_one_list() -> None:
    subjects = [Subject(kind="softmax", forward=torch.softmax, name=name) for name in ("first", "second")]
    (rows,) = (mark.args[1] for mark in parametrize(subjects, profile="quick").pytestmark)
    wanted = [p.id for p in select() if "softmax" in p.kinds]
    assert [row.id for row in rows] == [f"{s.name}-{i}" for s in subjects for i in wanted]


def test_every_family_has_its_mark(pytestconfig: pytest.Config) -> None:
    marks = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert {mark for p in select() for mark in (p.level, p.family)} <= marks


def test_the_plugin_is_inert_without_its_option(pytest_in: PytestIn, tmp_path: Path) -> None:
    (tmp_path / "test_numbers.py").write_text(HYPOTHESIS)
    timing = r"in \d+\.\d+s|\d+(\.\d+)? ?(ms|s)\b"
    with_plugin, without = (
        re.sub(timing, "#", pytest_in("-q", "--hypothesis-seed=1", *extra, "test_numbers.py"))
        for extra in ((), ("-p", "no:veriformer"))
    )
    assert with_plugin == without
