"""Running the command line as a person does, in a folder of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from veriformer.cli.main import main

Run = Callable[..., subprocess.CompletedProcess[str]]

MODELS = """
import os, signal, time
import torch
from torch import nn
from veriformer.properties import Subject


class TinyGPT(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, diagonal=1):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(64, d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.logits = nn.Linear(d_model, vocab_size)
        self.diagonal = diagonal

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(n))
        blocked = torch.ones(n, n).triu(self.diagonal).bool()
        return self.logits(x + self.attention(x, x, x, attn_mask=blocked, need_weights=False)[0])


def gpt(diagonal):
    return Subject(kind="decoder", build=lambda c: TinyGPT(c.vocab_size, c.d_model, c.num_heads, diagonal),
                   forward=lambda m, tokens: m(tokens), declares={"causal": True})


right, leaky = gpt(1), gpt(2)
twins = [gpt(2), gpt(2)]
uncallable = Subject(kind="layer", build=lambda c: object())
unbuildable = Subject(kind="layer", build=lambda c: 1 / 0)
nan = Subject(kind="layer", forward=lambda m, x: x * float("nan"))
tuples = Subject(kind="layer", forward=lambda m, x: (x, x))
flat = Subject(kind="layer", forward=lambda m, x: x.flatten(1))
integers = Subject(kind="layer", forward=lambda m, x: x.long())
mutating = Subject(kind="layer", forward=lambda m, x: x.add_(1))
crashing = Subject(kind="layer", forward=lambda m, x: os.kill(os.getpid(), signal.SIGSEGV))
greedy = Subject(kind="layer", forward=lambda m, x: torch.zeros(2**34) + x.sum())
recursive = Subject(kind="layer", forward=lambda m, x: recursive.forward(m, x))
number = 7


def picky(m, x):
    if x.shape[1] == 1:
        raise ValueError("sequences of one token are not supported")
    return x * 2


one_length = Subject(kind="layer", forward=picky, declares={"causal": True})


def broken_factory():
    raise RuntimeError("no weights here")
"""


ENVIRONMENT = {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture
def veriformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: None) -> Run:
    """Return a function that runs `veriformer` in a folder with models.py.

    The command runs in this process, so that all tests share the template that its workers are copies of; the workers
    are processes of their own, as always. `veriformer_alone` starts the command itself too.
    """
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code
        assert isinstance(code, int), code
        assert status is None or code == status, f"{code}\n{out.getvalue()}\n{err.getvalue()}"
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def veriformer_alone(tmp_path: Path) -> Run:
    """Return a function that starts `veriformer` as a process, in a folder with models.py."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")} | ENVIRONMENT

    def run(*arguments: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from veriformer.cli.main import main; main()", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert status is None or done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
