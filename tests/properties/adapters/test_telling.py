"""What a lone part is, told by what it adds and by the names of what it takes: positions, rotations, scores, losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import check
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.results.records import FAIL, OPEN


def sines(length: int, width: int, phase: float = 0.0) -> Tensor:
    at = torch.arange(length).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(at * rate + phase)
    table[:, 1::2] = torch.cos(at * rate + phase)
    return table


class BatchFirst(nn.Module):
    def __init__(self, d_model: int = 32, dropout: float = 0.1, max_len: int = 1000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", sines(max_len, d_model)[None])

    def forward(self, x: Tensor) -> Any:
        at = torch.cos(torch.zeros(()))  # names in the code say that the table is made of sines
        return self.dropout(x + at * self.pe[:, : x.size(1)])


class TimeFirst(BatchFirst):
    def forward(self, x: Tensor) -> Any:
        return self.dropout(x + torch.cos(torch.zeros(())) * self.pe[0, : x.size(0), None])


class Scaled(BatchFirst):
    def forward(self, x: Tensor) -> Any:
        return self.dropout(x * math.sqrt(x.size(-1)) + torch.cos(torch.zeros(())) * self.pe[:, : x.size(1)])


class Learned(nn.Module):
    def __init__(self, d_model: int, max_len: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, d_model)

    def forward(self, x: Tensor) -> Any:
        return x + self.table(torch.arange(x.size(1)))


class Shifted(BatchFirst):
    """Its sines start a quarter of a turn late: a defect."""

    def __init__(self, d_model: int = 32, dropout: float = 0.1, max_len: int = 1000) -> None:
        super().__init__(d_model, dropout, max_len)
        self.register_buffer("pe", sines(max_len, d_model, math.pi / 4)[None])


@pytest.mark.parametrize(
    ("made", "positions"),
    [(BatchFirst, "sinusoidal"), (TimeFirst, "sinusoidal"), (Scaled, "sinusoidal"), (Learned, "learned")],
)
def test_a_module_that_adds_a_table_is_judged_as_positions(made: type[nn.Module], positions: str) -> None:
    subject = as_subject(made)
    assert subject.kind == "positions"
    assert subject.guesses["positions"] == positions
    report = check(subject, profile="quick")
    assert report.ok, [(r.id, r.outcome, r.reason) for r in report.results if r.outcome not in ("PASS",)]
    assert any(r.outcome == "PASS" for r in report.results)


def test_a_wrong_table_is_found() -> None:
    report = check(as_subject(Shifted), only=["sinusoidal.definition"], profile="quick")
    assert [r.outcome for r in report.results if r.id == "sinusoidal.definition"] == [
        OPEN
    ]  # what it is made of was guessed


def test_the_axis_that_positions_run_along_is_told() -> None:
    assert any("along its first axis" in note for note in as_subject(TimeFirst).notes)
    assert not any("along its first axis" in note for note in as_subject(BatchFirst).notes)


class Gain(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x + self.shift


def test_what_adds_the_same_at_every_position_is_no_table_of_positions() -> None:
    assert as_subject(Gain).kind != "positions"


def _attend(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def shows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return _attend(scores if mask is None else scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min), v)


def hides(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Any = None) -> Any:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    weights = (scores if mask is None else scores.masked_fill(mask, torch.finfo(scores.dtype).min)).softmax(-1)
    return weights @ value, weights


def adds(Q: Tensor, K: Tensor, V: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # noqa: N803
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])
    return _attend(scores if attn_mask is None else scores + attn_mask.clamp(min=torch.finfo(scores.dtype).min), V)


def late(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights if mask is None else weights.masked_fill(mask == 0, 0.0)) @ v


@pytest.mark.parametrize(
    ("function", "told"),
    [(shows, "mask is True = may attend"), (hides, "mask is True = masked"), (adds, "attn_mask is float")],
)
def test_a_function_of_queries_keys_and_values_is_attention(function: Any, told: str) -> None:
    subject = as_subject(function)
    assert subject.kind == "attention"
    assert subject.mask_forms == ("pairwise",)
    assert any(note.startswith(told) for note in subject.notes)
    report = check(subject, profile="quick")
    assert report.ok, [(r.id, r.outcome, r.reason) for r in report.results if r.outcome not in ("PASS",)]


def test_a_mask_behind_the_softmax_is_found() -> None:
    report = check(as_subject(late), only=["attention.definition", "attention.masked-equals-removed"], profile="quick")
    assert FAIL in {r.outcome for r in report.results}


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Rotary(nn.Module):
    """Turns queries and keys together, counted from an offset."""

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base

    def angles(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        rates = self.base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        angle = torch.outer(torch.arange(start, end, dtype=torch.float32), rates)
        both = torch.cat((angle, angle), dim=-1)
        return both.cos(), both.sin()

    def forward(self, q: Tensor, k: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        cos, sin = (a.to(q.dtype) for a in self.angles(offset, offset + q.shape[-2]))
        return _turned(q, cos, sin), _turned(k, cos, sin)


class FromZero(Rotary):
    def forward(self, xq: Tensor, xk: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(xq, xk)


class Unpaired(Rotary):
    """Its angles are laid out for neighbours, its channels are paired by halves: a defect."""

    def angles(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        cos, sin = super().angles(start, end)
        both = [a[..., : a.shape[-1] // 2].repeat_interleave(2, dim=-1) for a in (cos, sin)]
        return both[0], both[1]


@pytest.mark.parametrize("made", [Rotary, FromZero])
def test_a_module_of_queries_and_keys_is_rotary(made: type[nn.Module]) -> None:
    subject = as_subject(made)
    assert subject.kind == "rotary"
    report = check(subject, profile="quick")
    assert report.ok, [(r.id, r.outcome, r.reason) for r in report.results if r.outcome not in ("PASS",)]
    assert {"rotary.relative", "rotary.frequencies"} <= {r.id for r in report.results if r.outcome == "PASS"}


def test_angles_laid_out_for_another_pairing_are_found() -> None:
    report = check(as_subject(Unpaired), only=["rotary.isometry", "rotary.relative"], profile="quick")
    assert {r.id for r in report.results if r.outcome == FAIL} == {"rotary.isometry", "rotary.relative"}


class Loss(nn.Module):
    def __init__(self, ignore_index: int = 0) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        picked = -logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
        counted = target != self.ignore_index
        return (picked * counted).sum() / counted.sum().clamp(min=1)


class Flat(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)


class OverAll(Loss):
    """Divides by all positions, not by those counted: a defect."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        picked = -logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
        return (picked * (target != self.ignore_index)).mean()


@pytest.mark.parametrize("made", [Loss, Flat])
def test_a_module_of_logits_and_labels_is_a_loss(made: type[nn.Module]) -> None:
    subject = as_subject(made)
    assert subject.kind == "loss"
    report = check(subject, profile="quick")
    assert report.ok, [(r.id, r.outcome, r.reason) for r in report.results if r.outcome not in ("PASS",)]


def test_a_loss_divided_by_what_it_does_not_count_is_found() -> None:
    report = check(as_subject(OverAll), only=["loss.definition"], profile="quick")
    assert [r.outcome for r in report.results if r.id == "loss.definition"] == [FAIL]
