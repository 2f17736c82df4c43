"""Standalone scripts: however a target is given, and without this package being there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts_run import HOLDS, VIOLATED, decision
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge
from veriformer.properties.targets import load

USERS = """
import torch
from torch import nn
from veriformer.properties import Subject

AHEAD = 1


class Decoder(nn.Module):
    def __init__(self, vocab_size=11, d_model=8):
        super().__init__()
        self.tokens, self.q = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, d_model)
        self.logits = nn.Linear(d_model, vocab_size)

    def forward(self, tokens):
        x = self.tokens(tokens)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(AHEAD)
        return self.logits(x + (self.q(x) @ x.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ x)


def leaky(tokens_first=False):
    return Subject(kind="decoder", build=lambda c: Decoder(c.vocab_size, c.d_model),
                   forward=lambda m, tokens: m(tokens), declares={"causal": True})


subject = leaky()
without_forward = Subject(kind="decoder", build=lambda c: Decoder(c.vocab_size, c.d_model), declares={"causal": True})
several = [leaky(), leaky()]
torch.manual_seed(0)
instance = Decoder()
wrapped = Subject(kind="decoder", module=instance, declares={"causal": True})


def makes_several():
    return [leaky(), leaky()]


class Inner:
    subject = subject
"""
FORMS = ("subject", "without_forward", "several[1]", "leaky", "makes_several[1]", "Decoder", "instance", "wrapped",
         "Inner.subject")  # fmt: skip


def script_of(place: str, form: str) -> str:
    (subject,) = load(f"{place}:{form}")
    judge = Judge(subject.with_facts(causal=True), Settings(profile="quick"))
    found = judge.judge(catalogue()["causality.first-token"]).counterexample
    assert found is not None
    return found.script


@pytest.mark.parametrize("form", FORMS)
def test_a_subject_is_reached_in_whatever_form_it_is_given(form: str, tmp_path: Path) -> None:
    models = tmp_path / "users.py"
    models.write_text(USERS, encoding="utf-8")
    script = script_of(str(models), form)
    assert decision(script) == VIOLATED, script
    models.write_text(USERS.replace("AHEAD = 1", "AHEAD = 0"), encoding="utf-8")
    assert decision(script) == HOLDS


def test_a_module_is_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text(USERS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = script_of("users_package.models", "subject")
    assert "import users_package.models as user" in script
    assert decision(script) == VIOLATED


def test_scripts_need_neither_this_package_nor_this_process(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS, encoding="utf-8")
    paths = []
    for form in ("subject", "Decoder"):
        paths.append(tmp_path / f"{form}.py")
        paths[-1].write_text(script_of(str(tmp_path / "users.py"), form), encoding="utf-8")
    run = (
        "import sys, runpy\nsys.modules['veriformer'] = None\n"
        "for path in sys.argv[1:]:\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end: print(int(end.code))"
    )
    done = subprocess.run([sys.executable, "-c", run, *map(str, paths)], capture_output=True, text=True, check=False)
    assert done.stdout.count("-> violated\n1\n") == len(paths), done.stdout + done.stderr


def test_a_subject_of_a_library_is_made_of_the_library() -> None:
    (subject,) = load("torch:LayerNorm")
    broken = subject.with_facts(norm="rms")
    found = Judge(broken, Settings(profile="quick")).judge(catalogue()["norm.shift-invariance"]).counterexample
    assert found is not None
    assert "LayerNorm" in found.script
    assert decision(found.script) == VIOLATED
