"""`veriformer identify`: what a bare module is, as far as calling it shows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import check
from veriformer.properties.adapters.recognising import as_subject, shipped
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.judge import Judge
from veriformer.properties.subject.subject import Subject
from veriformer.reference.config import Config
from veriformer.reference.model import build

Run = Callable[..., subprocess.CompletedProcess[str]]


def seen(subject: Subject) -> dict[str, Any]:
    findings, error = Judge(subject, Settings(profile="quick")).identify()
    assert not error
    return {finding.name: finding.value for finding in findings}


class Attention(nn.Module):
    """Self-attention over a window of the past, nothing said of it."""

    def __init__(self, d_model: int, num_heads: int, window: int = 5, scale: float = 0.5) -> None:
        super().__init__()
        self.heads, self.window, self.scale = num_heads, window, scale
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(1 - self.window)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        mixed = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_a_bare_window_is_recognised() -> None:
    found = seen(as_subject(Attention, kind="self_attention"))
    assert found["causal"] is True
    assert found["window"] == 5
    assert found["attention_scale"] == pytest.approx(0.5)
    assert found["deterministic"] is True
    assert found["batch_coupled"] is False


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder-learned", {"causal": True, "positions": "learned", "positions enter": "at the embedding"}),
        ("decoder-rotary", {"causal": True, "positions enter": "not at the embedding", "norm_placement": "pre"}),
        ("decoder-tied", {"tied": True, "norm": "rms"}),
        ("encoder", {"causal": False, "positions": "sinusoidal", "norm_placement": "post", "norm": "layer"}),
        ("encoder-none", {"positions": "none", "padding_side": "both"}),
        ("rotary", {"layout": "interleaved"}),
        ("loss", {"shifts_labels": False}),
        ("next-token-loss", {"shifts_labels": True}),
        ("rms-norm", {"norm": "rms"}),
        ("layer-post", {"norm_placement": "post"}),
    ],
)
def test_the_reference_is_recognised_without_its_declarations(name: str, expected: dict[str, Any]) -> None:
    shipped_subject = shipped("reference")[name]
    bare = Subject(
        kind=shipped_subject.kind, build=shipped_subject.build, forward=shipped_subject.forward,
        embed=shipped_subject.embed,
    )  # fmt: skip
    found = seen(bare)
    assert {name: found.get(name) for name in expected} == expected


def test_what_is_seen_is_judged() -> None:
    report = check(Attention, kind="self_attention", profile="quick")
    judged = {r.id: r.outcome for r in report.results}
    assert judged["causality.no-future-influence"] == "PASS"
    assert judged["causality.window"] == "OPEN"  # a window, or a mask too strict?
    assert any("window = 5" in note for note in report.subjects[0].probed)


def test_an_undeclared_model_in_full() -> None:
    report = check(build(Config(architecture="encoder", norm_placement="post")), profile="quick")
    assert report.ok, [(r.id, r.reason) for r in report.results if r.outcome not in ("PASS", "NOT_APPLICABLE")]


def test_the_command(veriformer: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "from veriformer.properties import Subject\n"
        "mine = Subject(kind='layer', build=lambda c: nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff,\n"
        "    batch_first=True), forward=lambda m, x: m(x), declares={'causal': True})\n"
        "broken = Subject(kind='layer', build=lambda c: None, forward=lambda m, x: m(x))\n",
        encoding="utf-8",
    )
    done = veriformer("identify", "mine.py:mine", status=0)
    assert "declared True" in done.stdout
    assert "norm_placement" in done.stdout
    assert "what flows inside" in done.stdout
    assert "linear2" in done.stdout
    (record,) = json.loads(veriformer("identify", "mine.py:mine", "--format", "json", status=0).stdout)
    network = next(part for part in record["anatomy"] if part["part"] == "feed-forward")
    assert (network["place"], network["measured"]["activation"]) == ("linear2", "relu")
    told = veriformer("identify", "mine.py:broken", "--format", "json", status=2)
    assert "NoneType" in json.loads(told.stdout)[0]["error"]
    assert json.loads(told.stdout)[0]["anatomy"] == []
