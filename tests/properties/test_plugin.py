"""The pytest door, tried from a scratch project against the built wheel; and that it is inert otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
def project(tmp_path: Path, wheel: Path) -> Path:
    """Return a scratch project with the wheel installed beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "installed")]
    subprocess.run([sys.executable, *install, str(wheel)], check=True, capture_output=True)
    (folder / "model.py").write_text(MODEL)
    return folder


def pytest_in(project: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(project.parent / "installed"), str(project)])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HYPOTHESIS", "CI"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=project, env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_two_lines_in_a_test_file(project: Path) -> None:
    (project / "test_model.py").write_text(TESTS)
    output = pytest_in(project, "-q", "-n", "2")
    failed = set(re.findall(r"FAILED test_model\.py::(\S+)", output))
    assert "test_leaky[causality.no-future-gradient]" in failed
    assert all(name.startswith("test_leaky[causality.") for name in failed), output
    assert "likely    influence exactly one step ahead: the mask's diagonal is off by one" in output
    assert "Traceback" not in output
    assert "parametrizing.py" not in output, "the failure must not lead through this package"


def test_subject_option_adds_items(project: Path) -> None:
    (project / "test_other.py").write_text("def test_other():\n    pass\n")
    output = pytest_in(project, "-q", "-n", "2", "--subject", "torch:softmax", "--subject-profile", "quick", "-rs")
    assert re.search(r"\d+ passed", output), output
    assert "failed" not in output
    assert "there is no file 'none.py'" in pytest_in(project, "-q", "--subject", "none.py:x")


def test_the_plugin_is_inert_without_its_option(project: Path) -> None:
    (project / "test_numbers.py").write_text(HYPOTHESIS)
    timing = r"in \d+\.\d+s|\d+(\.\d+)? ?(ms|s)\b"
    with_plugin, without = (
        re.sub(timing, "#", pytest_in(project, "-q", "--hypothesis-seed=1", *extra, "test_numbers.py"))
        for extra in ((), ("-p", "no:veriformer"))
    )
    assert with_plugin == without
