"""Targets: one reading of a word, whoever looks into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from veriformer.properties.adapters.target import Target, TargetError
from veriformer.properties.targets import load

SEVERAL = """
from veriformer.properties import Subject

def forward(model, x):
    return 2 * x

several = [Subject(kind="layer", forward=forward, name=name) for name in ("first", "second")]
single = several[0]
"""


@pytest.mark.parametrize(
    ("word", "parsed"),
    [
        ("torch", Target("library", "torch", "")),
        ("torch:LayerNorm", Target("library", "torch", "LayerNorm")),
        ("torch:../x.py:mine", Target("library", "torch", "../x.py:mine")),
        ("torch.nn:Linear", Target("module", "torch.nn", "Linear")),
        ("models.py:mine", Target("file", "models.py", "mine")),
        ("models.py:Mine.inner[12]", Target("file", "models.py", "Mine.inner", 12)),
        ("odd:folder/x.py:mine", Target("file", "odd:folder/x.py", "mine")),
        ("models.py:", Target("file", "models.py", "")),
    ],
)
def test_a_word_is_read_in_one_way_and_given_back(word: str, parsed: Target) -> None:
    assert Target.parse(word) == parsed
    assert str(parsed) == word


@pytest.mark.parametrize("word", ["", "models", "torchh", ":mine"])
def test_what_names_no_place_is_no_target(word: str) -> None:
    with pytest.raises(TargetError, match=r"is no target; give package.module:attribute, path/file.py:attribute, or"):
        Target.parse(word)


def test_a_library_leads_to_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch:").mkdir()
    (tmp_path / "x.py").write_text("open('ran', 'w').close()\nmine = 7\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=r"torch has no subject '/../x.py:mine'"):
        load("torch:/../x.py:mine")
    assert not (tmp_path / "ran").exists()


def test_one_of_several_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(SEVERAL, encoding="utf-8")
    place = f"{tmp_path}/models.py"
    assert [s.target for s in load(f"{place}:several")] == [f"{place}:several[0]", f"{place}:several[1]"]
    (one,) = load(f"{place}:several[1]")
    assert (one.name, one.target) == ("second", f"{place}:several[1]")
    assert load(f"{place}:single")[0].target == f"{place}:single"
    with pytest.raises(TargetError, match=r"several gives 2 subjects; there is no \[2\]: they are counted from 0"):
        load(f"{place}:several[2]")


def test_the_one_of_several_that_is_no_subject_is_named(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(SEVERAL + "mixed = [single, 3]\n", encoding="utf-8")
    with pytest.raises(TargetError, match=r"models\.py:mixed\[1\]: 'int' is not recognised"):
        load(f"{tmp_path}/models.py:mixed")
