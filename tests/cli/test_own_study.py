"""`veriformer ablate path/study.py:study` from outside: what is run again, what is not, what a wrong file gets."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from veriformer.ablations import Study
from veriformer.ablations.execution import executors
from veriformer.ablations.trials.own import LOADED
from veriformer.cli import own_studies
from veriformer.cli.own_studies import load_studies, train

Run = Callable[..., subprocess.CompletedProcess[str]]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "gated_gpt.py"

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4, act=nn.GELU, bad=False):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, width), act(), nn.Linear(width, 1)
        if bad:
            self.last = nn.Linear(width + 1, 1)

    def forward(self, x):
        from late import doubled
        return doubled(self.last(self.act(self.first(x))))[:, 0]
"""
LATE = """
def doubled(x):
    return 2 * x
"""
STUDY = """
import torch
from torch import nn
from torch.nn import functional
from net import Net
from veriformer.ablations import Recipe, Study, Task, Variant

def data(seed, step):
    x = torch.randn(8, 3)
    return x, x.sum(1)

task = Task(name="sum", data=data, loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
            metric_name="mean squared error", margin=0.1)
study = Study(name="own", question="How wide must it be?", build=lambda **config: Net(**config), tasks=task,
              recipe=Recipe(steps=3), files=["notes.txt"],
              variants=[Variant("4"), Variant("8", "four units", {"width": 8}),
                        Variant("relu", config={"act": nn.ReLU})])
nothing = 3
empty = []
two = [study, study]
Class = Study

def made():
    return study

def raising():
    raise KeyError("no such thing")

broken = Study(name="broken", build=lambda **config: Net(**config), tasks=task, recipe=Recipe(steps=3),
               variants=[Variant("fine"), Variant("bad", config={"bad": True})])
"""


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"study": STUDY, "net": NET, "late": LATE, **files}
    for name, text in given.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "notes.txt").write_text("first", encoding="utf-8")
    return folder / "study.py"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train in this process."""

    class Here:
        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(function(*arguments))
            except Exception as problem:
                future.set_exception(problem)
            return future

    @contextlib.contextmanager
    def opened(*_: object) -> Iterator[Here]:
        yield Here()

    monkeypatch.setattr(executors, "open_executor", opened)


def keys(study: Study) -> list[str]:
    return [study.trial(*row, seed=0).key((0,)) for row in study.rows()]


def test_the_ten_lines_of_the_example_run_in_processes(veriformer: Run, tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    declared = text[text.index("study = Study(") :].strip().splitlines()
    assert len(declared) <= 10
    assert "steps=100" in text
    (tmp_path / "mine.py").write_text(text.replace("steps=100", "steps=3"), encoding="utf-8")
    seen = veriformer("ablate", "mine.py:study", "--seeds", "2", "--jobs", "1", "--task", "copy", status=0)
    record = json.loads((tmp_path / ".veriformer/ablations/ablation.json").read_text())
    (study,) = record["studies"]
    assert [row["variant"] for row in study["rows"]] == ["gate", "no gate"]
    assert study["rows"][0]["stack"] == [2], study["notes"]
    assert study["rows"][0]["parameters"] > study["rows"][1]["parameters"]
    assert study["rows"][0]["attention"]
    assert "Does a gate on the attention help a small GPT?" in seen.stdout
    assert "prediction" not in seen.stdout
    page = (tmp_path / ".veriformer/ablations/index.html").read_text()
    assert "the gate on what attention brings" in page
    assert page.count("<svg") >= 4


@pytest.mark.usefixtures("here")
def test_an_unchanged_study_is_not_run_again_and_its_report_is_made_again(
    veriformer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{write(tmp_path / 'a')}:study"
    out = ("--seeds", "2", "--out", str(tmp_path / "out"))
    seen = veriformer("ablate", target, *out, status=0)
    assert "mean squared error [95 %]" in seen.stdout
    assert "not measured: attention entropy: no attention" in seen.stdout
    monkeypatch.setattr(executors, "open_executor", lambda *_: pytest.fail("a finished trial is run again"))
    veriformer("ablate", "--resume", *out[2:], status=0)
    again = veriformer("report", str(tmp_path / "out/ablation.json"), "--out", str(tmp_path / "again"), status=0)
    assert "mean squared error [95 %]" in again.stdout
    assert (tmp_path / "again/index.html").read_text() == (tmp_path / "out/index.html").read_text()


EDITS = {
    "the study": ("study.py", "steps=3", "steps=4"),
    "a module": ("net.py", "nn.Linear(width, 1)", "nn.Linear(width, 1, bias=False)"),
    "a module that is imported late": ("late.py", "2 * x", "3 * x"),
    "a file that it names": ("notes.txt", "first", "second"),
    "a comment": ("net.py", "import torch\n", "import torch  # of course\n"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_was_edited_is_trained_again(name: str, tmp_path: Path) -> None:
    before = keys(load_studies(f"{write(tmp_path / 'a')}:study")[0])
    assert keys(load_studies(f"{write(tmp_path / 'b')}:study")[0]) == before
    file, old, new = EDITS[name]
    path = write(tmp_path / "c").parent / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    after = keys(load_studies(f"{tmp_path / 'c' / 'study.py'}:study")[0])
    assert not set(before) & set(after)


def test_what_lies_beside_a_study_and_is_not_imported_changes_nothing(tmp_path: Path) -> None:
    before = keys(load_studies(f"{write(tmp_path / 'a')}:study")[0])
    assert keys(load_studies(f"{write(tmp_path / 'b', other='x = 1')}:study")[0]) == before


def test_modules_of_a_package_count_with_its_own(tmp_path: Path) -> None:
    for place, value in (("a", 1), ("b", 2)):
        package = tmp_path / place / "models"
        (package / "parts").mkdir(parents=True)
        (package / "__init__.py").write_text(f"value = {value}\n")
        (package / "parts" / "__init__.py").write_text("from . import deep\nfrom .. import value\n")
        (package / "parts" / "deep.py").write_text("")
        write(tmp_path / place, study="import models.parts.deep" + STUDY)
    first, second = (load_studies(f"{tmp_path / place / 'study.py'}:study")[0] for place in "ab")
    assert first.code is not None
    names = [name for name, _ in first.code.files]
    assert {"models/__init__.py", "models/parts/__init__.py", "models/parts/deep.py", "net.py"} <= set(names)
    assert keys(first) != keys(second)
    assert "torch" in dict(first.code.libraries)


def test_a_file_that_changes_while_a_run_is_under_way_is_noticed(tmp_path: Path) -> None:
    (study,) = load_studies(f"{write(tmp_path / 'a')}:study")
    assert study.code is not None
    trial = study.trial(*next(study.rows()), seed=0)
    LOADED.pop((study.code.target, "own"))
    (tmp_path / "a" / "net.py").write_text(NET + "\n")
    with pytest.raises(RuntimeError, match=r"net\.py was changed while the run was under way"):
        train([trial])


WRONG = {
    "study.py:nothing": "is int; a veriformer.ablations.Study, or a list of them, is required",
    "study.py:Class": "is Study; a veriformer.ablations.Study",
    "study.py:empty": "is an empty list",
    "study.py:two": "two studies are called 'own'",
    "study.py:raising": "was called to make a study, and raised KeyError: 'no such thing'",
    "study.py:stduy": "did you mean 'study'?",
    "net.py": "holds no Study",
    "nowhere.py": "there is no file",
    "wrong.py:study": "ValueError: study 'x' has no variants; the first is the base, the others are held against it "
    "(wrong.py, line 2)",
    "torch:Linear": "is a library",
}


@pytest.mark.parametrize("target", WRONG)
@pytest.mark.usefixtures("here")
def test_what_is_no_study_gets_one_sentence(target: str, veriformer: Run, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "wrong.py").write_text(
        "from veriformer.ablations import Study\nstudy = Study(name='x', variants=[], tasks='copy')\n"
    )
    answer = veriformer("ablate", target, "--seeds", "2", status=3)
    assert WRONG[target] in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr


@pytest.mark.usefixtures("here")
def test_a_variant_that_raises_is_told_and_the_others_are_tabled(veriformer: Run, tmp_path: Path) -> None:
    write(tmp_path)
    answer = veriformer("ablate", "study.py:broken", "--seeds", "2", "--out", str(tmp_path / "out"), status=2)
    told = " ".join(answer.stderr.split())
    assert "2 trials failed: broken, variant 'bad', task 'sum': testing the model: RuntimeError: mat1 and mat2" in told
    assert "(net.py, line 14) (seeds 2000, 2001)" in told
    assert "return doubled(self.last(self.act(self.first(x))))[:, 0]" in told
    assert "2 trials are missing" in answer.stdout
    record = json.loads((tmp_path / "out/ablation.json").read_text())
    assert [row["variant"] for row in record["studies"][0]["rows"]] == ["fine"]


def test_a_path_alone_gives_every_study_of_the_file(tmp_path: Path) -> None:
    assert [study.name for study in load_studies(str(write(tmp_path)))] == ["own", "broken"]


def test_workers_find_the_study_by_its_target(tmp_path: Path) -> None:
    (study,) = load_studies(f"{write(tmp_path)}:study")
    trial = study.trial(*next(study.rows()), seed=0)
    LOADED.clear()
    (record,) = own_studies.train([replace(trial, stacked=False)])["records"]
    assert record["stack"] == 1


def test_a_change_that_reaches_nothing_and_data_that_do_not_repeat_are_said(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(
        "import numpy\n"
        "import torch\n"
        "from torch import nn\n"
        "from veriformer.ablations import Recipe, Study, Task, Variant\n"
        "def draw(seed, step):\n"
        "    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(seed * 1000 + step))\n"
        "    return x, (x.sum(1) > 1.5).long()\n"
        "def other(seed, step):\n"
        "    x = torch.tensor(numpy.random.default_rng().random((8, 3))).float()\n"
        "    return x, (x.sum(1) > 1.5).long()\n"
        "study = Study(name='s', build=lambda gate=True: nn.Linear(3, 2), recipe=Recipe(steps=3),\n"
        "              tasks=[Task(name='sum', data=draw, chance=0.5)],\n"
        "              variants=[Variant('gate'), Variant('no gate', config={'gate': False})])\n"
        "careless = Study(name='c', build=study.build, recipe=Recipe(steps=3),\n"
        "                 tasks=[Task(name='sum', data=other, chance=0.5)], variants=[Variant('one')])\n"
    )
    out = veriformer("ablate", "study.py:study", "--seeds", "2", "--out", str(tmp_path / "out")).stdout
    assert "no gate: every seed came out exactly the same as gate's, to the last digit" in " ".join(out.split())
    out = veriformer("ablate", "study.py:careless", "--seeds", "2", "--out", str(tmp_path / "o2")).stdout
    assert "sum gave other data when it was asked again for the same seed" in " ".join(out.split())
