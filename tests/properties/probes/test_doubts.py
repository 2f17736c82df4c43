"""What is asked since code says it, or a whole sequence shows it, and no number decides: starts, ends, class tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject, check
from veriformer.properties.adapters.recognising import as_subject
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.judging.catalogue import named
from veriformer.properties.judging.judge import Judge
from veriformer.properties.results.records import OPEN, PASS, Result


def judged(thing: Any, prop: str, **facts: Any) -> Result:
    return Judge(as_subject(thing, **facts), Settings(profile="quick", named=(prop,))).judge(named((prop,))[0])


class Mix(nn.Module):
    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.write = nhead, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y: Tensor = self.write(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Layer(nn.Module):
    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(d_model), Mix(d_model, nhead)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mix(self.norm(x))
        return y


class Behind(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = x + self.mix(x)
        return y


class Writer(nn.Module):
    """A decoder whose writing matrices start smaller, as its code says."""

    layer: type[Layer] = Layer

    def __init__(self, vocab_size: int = 19, d_model: int = 16, nhead: int = 2, num_layers: int = 2) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(vocab_size, d_model), nn.LayerNorm(d_model)
        self.stack = nn.ModuleList(self.layer(d_model, nhead) for _ in range(num_layers))
        self.out = nn.Linear(d_model, vocab_size, bias=False)
        self.init_weights(num_layers)

    def is_small(self, name: str) -> bool:
        return name.endswith("write.weight")

    def init_weights(self, num_layers: int) -> None:
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * num_layers) if self.is_small(name) else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.stack:
            x = layer(x)
        logits: Tensor = self.out(self.norm(x))
        return logits


class NoneSmall(Writer):
    def is_small(self, name: str) -> bool:
        return name.endswith("write_out.weight")


class NormFirst(Writer):
    layer = Behind


class Ended(nn.Module):
    """Texts end in a token of their own; what it became is what is given."""

    def __init__(self, vocab_size: int = 19, d_model: int = 16, nhead: int = 2) -> None:
        super().__init__()
        self.eos_id = vocab_size - 2
        self.table, self.layer = nn.Embedding(vocab_size, d_model), Layer(d_model, nhead)
        self.place = nn.Parameter(torch.randn(64, d_model))

    def read(self, y: Tensor, ids: Tensor) -> Tensor:
        return y[torch.arange(len(y)), (ids == self.eos_id).int().argmax(1)]

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.layer(self.table(ids) + self.place[: ids.shape[1]]), ids)


class EndedLast(Ended):
    def read(self, y: Tensor, ids: Tensor) -> Tensor:
        return y[:, -1]


class Labelled(nn.Module):
    """A class token stands before the tokens, and is read out behind two layers."""

    def __init__(self, vocab_size: int = 19, d_model: int = 16, nhead: int = 2, num_classes: int = 3) -> None:
        super().__init__()
        self.table, self.class_token = nn.Embedding(vocab_size, d_model), nn.Parameter(torch.randn(d_model))
        layer = nn.TransformerEncoderLayer(d_model, nhead, 2 * d_model, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, num_classes)

    def read(self, y: Tensor) -> Tensor:
        return y[:, 0]

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.stack(torch.cat([self.class_token.expand(len(tokens), 1, -1), self.table(tokens)], 1))
        labels: Tensor = self.head(self.read(y))
        return labels


class LabelledByTheFirstToken(Labelled):
    def read(self, y: Tensor) -> Tensor:
        return y[:, 1]


@pytest.mark.parametrize(
    ("right", "wrong", "prop", "told"),
    [
        (Writer, NoneSmall, "parameters.all-used", "is the scaling applied to nothing"),
        (Writer, NormFirst, "anatomy.residual", "is the residual taken behind the norm"),
        (Ended, EndedLast, "batch.independence", "is another token pooled"),
        (Labelled, LabelledByTheFirstToken, "parameters.all-used", "is another position read out"),
    ],
)
def test_a_doubt_is_asked_about_the_wrong_one_alone(right: Any, wrong: Any, prop: str, told: str) -> None:
    assert told not in judged(right, prop).reason
    asked = judged(wrong, prop)
    assert asked.outcome == OPEN, asked.reason
    assert told in asked.reason


def test_a_doubt_that_is_answered_is_not_raised() -> None:
    assert judged(NoneSmall, "parameters.all-used", init="other").outcome == PASS
    assert judged(NormFirst, "anatomy.residual", norm_placement="post").outcome == PASS


@pytest.mark.parametrize(("first", "asks"), [(1, False), (0, True)])
def test_a_bias_straight_in_the_distance_by_other_slopes_is_asked_about(first: int, asks: bool) -> None:
    def bias(model: None, queries: int, keys: int) -> torch.Tensor:
        apart = torch.arange(queries)[:, None] - torch.arange(keys)
        return -(2.0 ** (-8 * torch.arange(first, first + 4) / 4))[:, None, None] * apart.abs()

    report = check(Subject(kind="position_bias", forward=bias), profile="quick", only=["position-bias", "alibi"])
    asked = [r for r in report.results if r.outcome == "OPEN"]
    assert ["the slopes are 1, 0.25" in r.reason for r in asked] == [True] * asks
    assert report.ok != asks
