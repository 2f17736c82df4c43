"""Standalone scripts: however a target is given, and without this package being there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts_run import HOLDS, VIOLATED, decision
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge
from veriformer.properties.targets import at_home, load

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
    with at_home(subject.target):
        found = judge.judge(catalogue()["causality.first-token"]).counterexample
    assert found is not None
    return found.script


@pytest.mark.parametrize("form", FORMS)
def test_a_subject_is_reached_in_whatever_form_it_is_given(form: str, tmp_path: Path) -> None:
    models = tmp_path / "users.py"
    models.write_text(USERS, encoding="utf-8")
    script = script_of(str(models), form)
    assert decision(script) == VIOLATED, script
    mended = USERS.replace("AHEAD = 1", "AHEAD = 0  # of another size: Python's cached code may be of the same second")
    models.write_text(mended, encoding="utf-8")
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


PLACES = {
    "types.py": "types.py:subject", "torch.py": "torch.py:subject", "tokenize.py": "tokenize.py:subject",
    "my models.py": "my models.py:subject", "class.py": "class.py:subject",
    "ours/layers/models.py": "ours/layers/models.py:subject", "ours/late.py": "ours.late:subject",
    "ours/__init__.py": "ours/__init__.py:subject", "code/models.py": "code/models.py:subject",
    "ours/my-models.py": "ours/my-models.py:subject", "bare/models.py": "bare.models:subject",
}  # fmt: skip
RUN = """
import os, runpy, sys, torch
sys.modules["veriformer"] = None
for path in sys.argv[1:]:
    if child := os.fork():
        print(path, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        status = 99
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = int(end.code)
        finally:
            os._exit(status)
"""


def test_scripts_find_what_stands_beside_the_file_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts, offsets = [], []
    for number, (file, target) in enumerate(PLACES.items()):
        folder = tmp_path / f"p{number}"
        (folder / file).parent.mkdir(parents=True)
        for parent in [p for p in (folder / file).relative_to(folder).parents if p not in (Path(), Path("bare"))]:
            (folder / parent / "__init__.py").touch()
        in_package = "/" in file and not file.startswith("bare")
        offsets.append((folder / file).parent / "offset.py")
        offsets[-1].write_text("AHEAD = 1\n", encoding="utf-8")
        where = ".offset" if in_package else "bare.offset" if "/" in file else "offset"
        (folder / file).write_text(USERS.replace("AHEAD = 1", f"from {where} import AHEAD"), encoding="utf-8")
        monkeypatch.chdir(folder)
        place, _, form = target.partition(":")
        script = script_of(place, form)
        assert str(tmp_path) not in script
        scripts.append(folder / ".veriformer" / f"{number}.py")
        scripts[-1].parent.mkdir()
        scripts[-1].write_text(script, encoding="utf-8")
    monkeypatch.chdir("/")
    for offset, status in ((1, 1), (0, 0)):  # while it is wrong, and once it is mended
        for path in offsets:
            path.write_text(f"AHEAD = {offset}\n", encoding="utf-8")
        command = [sys.executable, "-B", "-c", RUN, *map(str, scripts)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        ended = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith(str(tmp_path)))
        assert ended == {str(s): str(status) for s in scripts}, done.stdout + done.stderr


def test_a_subject_of_a_library_is_made_of_the_library() -> None:
    (subject,) = load("torch:LayerNorm")
    broken = subject.with_facts(norm="rms")
    found = Judge(broken, Settings(profile="quick")).judge(catalogue()["norm.shift-invariance"]).counterexample
    assert found is not None
    assert "LayerNorm" in found.script
    assert decision(found.script) == VIOLATED


def test_a_script_is_read_on_one_screen_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users.py").write_text(USERS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    script = script_of("users.py", "subject")
    assert len(script.splitlines()) <= 60
    assert max(map(len, script.splitlines())) <= 113
    assert str(tmp_path) not in script
    told = " ".join((ast.get_docstring(ast.parse(script)) or "").split())
    assert told.startswith("The first output is a function of the first input alone. Not so here: ")
    for words in ("The check", "expected", "tolerance", "Likely cause: influence exactly one step ahead"):
        assert words in told
    assert decision(script) == VIOLATED


def test_a_script_that_cannot_run_says_so_and_is_no_violation(tmp_path: Path) -> None:
    models = tmp_path / "users.py"
    models.write_text(USERS, encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(script_of(str(models), "subject"), encoding="utf-8")
    for broken in ("import nothing_of_this_name\n" + USERS, USERS.replace("x.shape[1], dtype", "x.shape[9], dtype")):
        models.write_text(broken, encoding="utf-8")
        command = [sys.executable, "-B", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith("cannot run, so nothing is shown: ")
        assert "nothing_of_this_name" in sentence or "IndexError" in sentence
