"""Bare models whose inputs or outputs are no sequence of tokens: two towers, queries of their own, grids, series."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import FAIL, OPEN, PASS, Result


def judged(thing: Any, prop: str) -> Result:
    return Judge(as_subject(thing), Settings(profile="quick", named=(prop,))).judge(named((prop,))[0])


def blocks(width: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Matcher(nn.Module):
    """Pictures and captions in one space; the scores of all with all."""

    def __init__(self, n_words: int = 40, d_model: int = 16, nhead: int = 2) -> None:
        super().__init__()
        self.cells, self.words = nn.Conv2d(3, d_model, 8, 8), nn.Embedding(n_words, d_model)
        self.stack, self.bias = blocks(d_model, nhead), nn.Parameter(torch.zeros(()))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def look(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.cells(pixels).flatten(2).mean(-1), dim=-1)

    def read(self, caption: Tensor) -> Tensor:
        return F.normalize(self.stack(self.words(caption)).mean(1), dim=-1)

    def forward(self, pixels: Tensor, caption: Tensor) -> Tensor:
        return self.look(pixels) @ self.read(caption).mT * self.log_scale.exp() + self.bias


class NormOfAll(Matcher):
    def read(self, caption: Tensor) -> Tensor:
        return F.normalize(self.stack(self.words(caption)).mean(1), dim=0)


class NoNorm(Matcher):
    def read(self, caption: Tensor) -> Tensor:
        return self.stack(self.words(caption)).mean(1)


class NoExponent(Matcher):
    def forward(self, pixels: Tensor, caption: Tensor) -> Tensor:
        return self.look(pixels) @ self.read(caption).mT * self.log_scale


class Contrasted(Matcher):
    def forward(self, pixels: Tensor, caption: Tensor) -> Tensor:
        scores, right = super().forward(pixels, caption), torch.arange(len(caption), device=caption.device)
        return F.cross_entropy(scores, right) + F.cross_entropy(scores.mT, right)


class Chosen(Matcher):
    """What each picture makes of the captions: shares, which sum to one over these."""

    def forward(self, pixels: Tensor, caption: Tensor) -> Tensor:
        return super().forward(pixels, caption).softmax(-1)


class Finder(nn.Module):
    """Things found in features `[cells, B, D]` by queries of its own: boxes and names."""

    def __init__(self, d_model: int = 16, nhead: int = 2, things: int = 3) -> None:
        super().__init__()
        self.asked = nn.Embedding(things, d_model)
        layer = nn.TransformerDecoderLayer(d_model, nhead, 2 * d_model, 0.0)
        self.stack = nn.TransformerDecoder(layer, 1)
        self.box, self.name = nn.Linear(d_model, 4), nn.Linear(d_model, 5)

    def spread(self, samples: int) -> Tensor:
        return self.asked.weight[:, None].expand(-1, samples, -1)

    def forward(self, features: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        y = self.stack(self.spread(features.shape[1]), features, memory_key_padding_mask=padding_mask)
        return {"boxes": self.box(y).sigmoid().transpose(0, 1), "names": self.name(y).transpose(0, 1)}


class MixedQueries(Finder):
    def spread(self, samples: int) -> Tensor:
        return self.asked.weight.repeat(samples, 1).view(-1, samples, self.asked.embedding_dim)


class Cells(nn.Module):
    """A block over `[B, 6, 6, D]`: cells attend within windows of three, which are moved by one."""

    def __init__(self, dim: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.before, self.mix = nn.LayerNorm(dim), nn.MultiheadAttention(dim, heads, batch_first=True)

    def back(self, x: Tensor) -> Tensor:
        return x.roll((1, 1), (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, d = x.shape
        y = self.before(x).roll((-1, -1), (1, 2)).view(b, h // 3, 3, w // 3, 3, d).transpose(2, 3).reshape(-1, 9, d)
        y = self.mix(y, y, y, need_weights=False)[0].view(b, h // 3, w // 3, 3, 3, d).transpose(2, 3)
        return x + self.back(y.reshape(b, h, w, d))


class CellsAstray(Cells):
    def back(self, x: Tensor) -> Tensor:
        return x.roll((-2, -2), (1, 2))


class Forecast(nn.Module):
    """A series `[B, 20, 3]` is normalised, read in patches and foretold in its own units."""

    def __init__(self, n_vars: int = 3, history: int = 20, ahead: int = 4) -> None:
        super().__init__()
        self.history, self.embed, self.stack = history, nn.Linear(5, 16), blocks(16, 2)
        self.place = nn.Parameter(0.02 * torch.randn(history // 5, 16))
        self.head, self.channels = nn.Linear(16 * history // 5, ahead), n_vars

    def undone(self, y: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
        return y * spread + mean

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.history
        mean, spread = x.mean(1, keepdim=True), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        y = ((x - mean) / spread).mT.flatten(0, 1).unflatten(1, (-1, 5))
        y = self.head(self.stack(self.embed(y) + self.place).flatten(1)).unflatten(0, (len(x), -1)).mT
        return self.undone(y, mean, spread)


class ForecastAstray(Forecast):
    def undone(self, y: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
        return (y + mean) * spread


@pytest.mark.parametrize(
    ("thing", "prop", "outcome"),
    [
        (Matcher, "batch.independence", PASS),
        (Matcher, "anatomy.scale", PASS),
        (NormOfAll, "batch.independence", OPEN),
        (NoNorm, "anatomy.scale", OPEN),
        (NoExponent, "anatomy.scale", OPEN),
        (Contrasted, "batch.independence", PASS),
        (Chosen, "batch.independence", PASS),
        (Finder, "batch.independence", PASS),
        (Finder, "padding.amount-irrelevant", PASS),
        (MixedQueries, "batch.independence", FAIL),
        (Cells, "batch.independence", PASS),
        (CellsAstray, "batch.independence", OPEN),
        (Forecast, "batch.independence", PASS),
        (ForecastAstray, "batch.independence", OPEN),
    ],
)
def test_what_is_no_sequence_is_understood_and_judged(thing: Any, prop: str, outcome: str) -> None:
    result = judged(thing, prop)
    assert result.outcome == outcome, result.reason


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (Matcher, "compares every caption with every pixels"),
        (Contrasted, "one number for a batch"),
        (Chosen, "sum to one over the samples"),
        (Finder, "its first axis is time"),
        (Cells, "as a grid of 6 x 6"),
        (Forecast, "takes 20 positions alone"),
    ],
)
def test_how_it_is_judged_is_said(thing: Any, told: str) -> None:
    subject = as_subject(thing)
    assert subject.kind == "classifier"
    assert any(told in note for note in subject.notes), subject.notes


class Rotated(nn.Module):
    """A decoder that turns a given number of channels of each head, more than the smallest heads have."""

    def __init__(self, vocab_size: int, n_embd: int = 32, n_head: int = 2, rotary_dim: int = 8) -> None:
        super().__init__()
        self.n_head, self.rotary_dim = n_head, rotary_dim
        self.table, self.out = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size)
        self.qkv, self.o, self.norm = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd), nn.LayerNorm(n_embd)

    def turned(self, x: Tensor) -> Tensor:
        n = self.rotary_dim
        steps = 10000.0 ** (-torch.arange(0, n, 2, device=x.device) / n)
        angles = (torch.arange(x.shape[-2], device=x.device)[:, None] * steps).to(x.dtype)
        a, b = x[..., : n // 2], x[..., n // 2 : n]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., n:]], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.out(self.o(y.transpose(1, 2).flatten(2)) + self.table(ids))


def test_channels_that_are_turned_follow_the_heads() -> None:
    assert as_subject(Rotated).kind == "decoder"
    assert judged(Rotated, "causality.prefix-consistency").outcome == PASS


class Fixed(nn.Module):
    """A class whose drawn sizes do not fit: it needs its vocabulary, the rest is as it is."""

    def __init__(self, vocab_size: int, d_model: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)
        self.stack, self.gains = blocks(d_model, heads), nn.Parameter(torch.ones(24))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.stack(self.table(ids) * self.gains))


def test_a_class_that_needs_one_size_is_judged_at_its_own_others() -> None:
    subject = as_subject(Fixed)
    assert subject.domain["d_model"] == (24,)
    assert "vocab_size" not in subject.domain
