"""Outputs in the wrong place: each fault of the class gets its own sentence, and a right subject none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.diagnosis.places.rows import misplaced
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.draws import RecordedDraws
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def told(subject: Subject) -> str | None:
    return misplaced(Case(Workbench(subject, Settings(profile="quick")), RecordedDraws({"config": 0, "seed": 0})))


class Encoder(nn.Module):
    """One attention with one head a channel pair, absolute positions and a residual connection; `slip` breaks it."""

    def __init__(self, c: DrawnConfig, slip: str = "") -> None:
        super().__init__()
        self.slip, self.heads, self.kept = slip, c.num_heads, dict[int, Tensor]()
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(64, c.d_model)
        self.up, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def positions(self, tokens: Tensor, mask: Tensor) -> Tensor:
        batch, length = tokens.shape
        at = torch.arange(length).expand(batch, length)
        if self.slip == "positions over batch":
            return torch.arange(batch)[:, None].expand(batch, length)
        if self.slip == "cumsum over batch":
            return (mask.long().cumsum(0) - 1).clamp(min=0)
        if self.slip == "counted on":
            before = mask.sum(1).cumsum(0) - mask.sum(1)
            return at + before[:, None]
        return at

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length = tokens.shape
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if self.slip == "kept mask":
            mask = self.kept.setdefault(length, mask) if len(self.kept.get(length, mask)) == batch else mask
        if self.slip == "written mask":
            kept = self.kept.setdefault(100 * batch + length, torch.ones_like(mask))
            kept &= mask
            mask = kept
        if self.slip == "first mask":
            mask = mask[:1].expand_as(mask)
        if self.slip == "inverted":
            hides = mask.logical_not_()
            mask = ~hides
        if self.slip == "reversed masks":
            mask = mask.flip(0)
        x = self.embed(tokens) + self.place(self.positions(tokens, mask))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.up(x).chunk(3, -1))
        rows = mask.repeat(self.heads, 1) if self.slip == "tiled" else mask.repeat_interleave(self.heads, 0)
        hidden = ~rows.unflatten(0, (batch, self.heads))[:, :, None]
        scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9)
        y = x + self.out((scores.softmax(0 if self.slip == "softmax" else -1) @ v).transpose(1, 2).flatten(2))
        if self.slip == "reshaped":
            y = y.transpose(0, 1).contiguous().reshape(batch, length, -1)
        if self.slip == "rolled":
            y = y.roll(1, 0)
        if self.slip == "cut":
            y = y * (torch.arange(length) < mask[0].sum())[None, :, None]
        if self.slip == "standardised":
            y = (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-5).sqrt()
        return y


def encoder(slip: str = "") -> Subject:
    return Subject(
        kind="encoder",
        build=lambda c: Encoder(c, slip),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"positions": "learned"},
    )


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("positions over batch", "counted along the batch axis instead of along time"),
        ("cumsum over batch", "counted along the batch axis instead of along time"),
        ("counted on", "counted on through the batch"),
        ("tiled", "the mask is tiled over heads"),
        ("first mask", "the padding mask of the first sample is used for all samples"),
        ("reversed masks", "padding masks are used in reversed order"),
        ("softmax", "a softmax runs over the batch, axis 0 of a tensor with 4 axes"),
        ("standardised", "a variance is taken over the batch"),
        ("reshaped", "from [T, B, D] to [B, T, D] by a reshape instead of a transpose"),
        ("rolled", "moved by one sample"),
        ("cut", "all samples are cut at the length of the first"),
        ("kept mask", "the mask is kept and used again"),
        ("inverted", "a call inverts the mask that it is given, in place"),
        ("written mask", "a kept mask is written to in place"),
    ],
)
def test_what_an_encoder_does_to_its_batch_is_said(slip: str, said: str) -> None:
    assert said in (told(encoder(slip)) or "nothing")


def test_a_right_encoder_is_said_nothing_of() -> None:
    assert told(encoder()) is None


class Last(nn.Module):
    """A causal classifier that reads the last token: of each sample, or at the first sample's place."""

    def __init__(self, c: DrawnConfig, slip: str) -> None:
        super().__init__()
        self.slip, self.embed, self.out = slip, nn.Embedding(c.vocab_size, 8), nn.Linear(8, c.num_classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens).cumsum(1).tanh()
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        lengths = mask.sum(1)
        if self.slip == "first":
            lengths = lengths[:1].expand_as(lengths)
        if self.slip == "longest":
            lengths = lengths.max().expand_as(lengths)
        return self.out(x[torch.arange(len(x)), lengths - 1])


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("", None),
        ("first", "of the first sample (its length, the place of its last token) is used for all samples"),
        ("longest", "the longest length is used for all"),
    ],
)
def test_where_a_classifier_reads_is_said(slip: str, said: str | None) -> None:
    subject = Subject(
        kind="classifier",
        build=lambda c: Last(c, slip),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    )
    found = told(subject)
    assert found is None if said is None else said in (found or "nothing")


class Experts(nn.Module):
    """Tokens are sorted by the expert that they go to."""

    def __init__(self, c: DrawnConfig, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.back = nn.Linear(c.d_model, 3), back
        self.maps = nn.ModuleList(nn.Linear(c.d_model, c.d_model) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        share, expert = self.router(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        parts = flat[order].split(torch.bincount(expert, minlength=3).tolist())
        y = torch.cat([one(part).tanh() for one, part in zip(self.maps, parts, strict=True)])
        return (share[:, None] * y[self.back(order)]).reshape(x.shape)


@pytest.mark.parametrize(
    ("back", "said"),
    [
        (lambda order: order.argsort(), None),
        (lambda order: order, "a sort that is applied a second time where its inverse belongs"),
        (lambda order: torch.arange(len(order)), "a sort that is not undone"),
    ],
)
def test_how_a_sort_is_undone_is_said(back: Callable[[Tensor], Tensor], said: str | None) -> None:
    subject = Subject(kind="feed_forward", build=lambda c: Experts(c, back), forward=lambda m, x: m(x))
    found = told(subject)
    assert found is None if said is None else said in (found or "nothing")


def chunked(net: nn.Module, x: Tensor, slip: str) -> Tensor:
    if slip == "floor":
        count = max(x.shape[1] // 4, 1)
        whole = torch.zeros_like(x)
        done = torch.cat([net(part) for part in x[:, : 4 * count].split(4, 1)], 1)
        whole[:, : done.shape[1]] = done
        return whole
    if slip == "batch":
        return torch.cat([net(part).flatten(0, 1) for part in x.split(4, 1)]).reshape(x.shape)
    if slip == "channels":
        return net(x.reshape(len(x), x.shape[2], x.shape[1]).transpose(1, 2))
    if slip == "first four":
        return torch.cat([net(x[:, :4]), x[:, 4:]], 1)
    return net(x)


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("", None),
        (
            "floor",
            "wrong at every length above 4 that is no multiple of 4: with 5 tokens position 4 of 0 to 4 gives zeros",
        ),
        ("batch", "chunks of 4 positions are put together along the batch axis and not along time"),
        ("channels", "the input is brought from [B, T, D] to [B, D, T] by a reshape instead of a transpose"),
        ("first four", "right up to 4 tokens, wrong from 5 on"),
    ],
)
def test_at_which_lengths_and_how_is_said(slip: str, said: str | None) -> None:
    subject = Subject(
        kind="feed_forward",
        build=lambda c: nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model)),
        forward=lambda m, x: chunked(m, x, slip),
    )
    found = told(subject)
    assert found is None if said is None else said in (found or "nothing")
