"""A function that needs arguments: what is said of it, and how it is judged once its kind is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from veriformer.properties.adapters.target import TargetError
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import catalogue
from veriformer.properties.judging.judge import Judge
from veriformer.properties.targets import load

MINE = """
import torch


def attend(model, q, k, v, attention_mask=None):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def normalise(scores, dim=-1, *, temperature):
    return (scores / temperature).softmax(dim)


def paired(left, right):
    return left @ right
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "kind", "taken"),
    [
        ("attend", "attention", "(model, q, k, v, attention_mask)"),
        ("normalise", "softmax", "(scores, dim, temperature)"),
        ("paired", "KIND", "(left, right)"),
    ],
)
def test_a_function_that_needs_arguments_is_asked_for_its_kind(mine: Path, name: str, kind: str, taken: str) -> None:
    with pytest.raises(TargetError) as told:
        load(f"{mine}:{name}")
    words = str(told.value)
    assert f"is a function of {taken}" in words
    assert f"--kind {kind}{' perhaps: that is called with (' * (kind != 'KIND')}" in words
    assert "`veriformer kinds`" in words


def test_a_function_of_a_model_is_called_with_one(mine: Path) -> None:
    (subject,) = load(f"{mine}:attend", kind="attention")
    found = Judge(subject, Settings(profile="quick")).judge(catalogue()["attention.definition"])
    assert found.outcome == "PASS", found.reason
