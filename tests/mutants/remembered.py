"""Faults of what a model keeps or is made of twice: states of a segment, steps of a cache, copies of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.objectives import loss


class _Layer(nn.Module):
    """A pre-norm layer that projects its past anew from the states that it is handed."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.first, self.second = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.query, self.pairs = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, 2 * c.d_model)
        self.out = nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor, past: Tensor, norms: Callable[[_Layer], nn.Module]) -> Tensor:
        states = self.first(torch.cat([past, x], 1))
        many, end = x.shape[1], states.shape[1]
        q = self.query(states[:, -many:]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.pairs(states).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.ones(end, end, dtype=torch.bool, device=x.device).tril()[-many:]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norms(self)(x))))


class _Segments(nn.Module):
    """A causal decoder that keeps what its layers were given of earlier segments; order is seen by rising sums."""

    def __init__(self, c: DrawnConfig, kept: Callable[..., Tensor], norms: Callable[[_Layer], nn.Module]) -> None:
        super().__init__()
        self.kept, self.norms = kept, norms
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens: Tensor, memory: list[Tensor] | None = None) -> Tensor:
        memory = [] if memory is None else memory
        begin = memory[0].shape[1] if memory else 0
        x = self.embed(tokens) + self.place.weight[begin : begin + tokens.shape[1]]
        past = memory or [x[:, :0]] * len(self.layers)
        keep = []
        for layer, before in zip(self.layers, past, strict=True):
            y = layer(x, before, self.norms)
            keep.append(torch.cat([before, self.kept(x, y)], 1))
            x = y
        memory[:] = keep
        return self.head(x)

    def in_segments(self, chunks: Any) -> Tensor:
        memory: list[Tensor] = []
        return torch.cat([self(chunk, memory) for chunk in chunks], 1)


def _given(x: Tensor, y: Tensor) -> Tensor:
    return x


def _second(layer: _Layer) -> nn.Module:
    return layer.second


def _segments(kept: Callable[..., Tensor] = _given, norms: Callable[[_Layer], nn.Module] = _second) -> Subject:
    return Subject(
        kind="decoder", build=lambda c: _Segments(c, kept, norms), forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: m.in_segments(chunks), mask_forms=(),
        declares={"positions": "learned", "norm_placement": "pre", "activation": "gelu", "final_norm": False},
    )  # fmt: skip


@fault(
    "KV-states-behind",
    "A layer keeps of a segment what it made, where it is to keep what it was given",
    killed_by=("decoding.cache",),
    cause="one layer too high",
)
def states_behind_the_layer() -> Subject:
    return _segments(kept=put(lambda x, y: y, instead_of=_given))


@fault(
    "NM-first-again",
    "The first norm of a layer stands before the feed-forward network, too, and the second is never called",
    killed_by=("parameters.all-used",),
    cause="once in its place",
)
def first_norm_again() -> Subject:
    return _segments(norms=put(lambda layer: layer.first, instead_of=_second))


def _of_a_token(size: Tensor) -> Tensor:
    return size.amax(-1, keepdim=True)


class _Steps(nn.Module):
    """A causal decoder of one layer, of keys and values in whole numbers: a step each token, also in its cache."""

    def __init__(self, c: DrawnConfig, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.step = c.num_heads, step
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    @staticmethod
    def rounded(x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        own = step(x.abs()).clamp(min=1e-12) / 127
        return (x / own).round() * own

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        begin = cache[0].shape[-2] if cache else 0
        x = self.embed(tokens) + self.place.weight[begin : begin + tokens.shape[1]]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        parts = [self.rounded(part, _of_a_token if cache is None else self.step) for part in (k, v)]
        if cache is not None:
            cache[:] = [torch.cat([old, new], -2) for old, new in zip(cache, parts, strict=True)] if cache else parts
            parts = cache
        end = parts[0].shape[-2]
        seen = torch.ones(end, end, dtype=torch.bool, device=x.device).tril()[-tokens.shape[1] :]
        attended = F.scaled_dot_product_attention(q, parts[0], parts[1], seen).transpose(1, 2).flatten(2)
        return self.head(x + self.out(attended))

    def in_chunks(self, chunks: Any) -> Tensor:
        cache: list[Tensor] = []
        return torch.cat([self(chunk, cache) for chunk in chunks], 1)


@fault(
    "KV-step-of-all",
    "The step of a cache of whole numbers is that of all tokens of a call, where each token has its own",
    killed_by=("decoding.cache",),
    cause="one step (scale) is taken for a whole",
)
def one_step_for_all() -> Subject:
    step = put(lambda size: size.amax((-2, -1), keepdim=True), instead_of=_of_a_token)
    return Subject(
        kind="decoder", build=lambda c: _Steps(c, step), forward=lambda m, tokens: m(tokens),
        cache=lambda m, chunks: m.in_chunks(chunks), mask_forms=(),
        declares={"positions": "learned", "structure": "other", "quantised": True},
    )  # fmt: skip


@fault(
    "LS-moved-in-chunks",
    "A loss in chunks of eight tokens moves the labels inside each: the first of every later chunk is never predicted",
    killed_by=("loss.definition",),
    cause="the labels are moved inside each chunk of 8 tokens",
)
def moved_in_chunks() -> Subject:
    def whole(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :-1].flatten(0, 1), y[:, 1:].flatten()

    def chunks(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        parts = [whole(a, b) for a, b in zip(x.split(8, 1), y.split(8, 1), strict=True)]
        return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])

    pairs = put(chunks, instead_of=whole)

    def summed(x: Tensor, y: Tensor) -> Tensor:
        rows, labels = pairs(x, y)
        return F.cross_entropy(rows, labels, reduction="sum")

    return loss(lambda m, x, y: summed(x, y) / (y[:, 1:] != -100).sum().clamp(min=1),
                shifts_labels=True)  # fmt: skip


class _Mixture(nn.Module):
    """A feed-forward network made of the mean of two, with what a fault may change handed in."""

    def __init__(self, c: DrawnConfig, weights: Callable[[_Mixture], Tensor], drop: Callable[..., Tensor]) -> None:
        super().__init__()
        self.made_of, self.rate = (weights, drop), c.dropout
        self.ups = nn.ModuleList(nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(c.d_ff, c.d_model)
        self.kept = {"up": torch.stack([up.get_parameter("weight").detach().clone() for up in self.ups])}

    def forward(self, x: Tensor) -> Tensor:
        weights, drop = self.made_of
        y = F.gelu(torch.einsum("...d,efd->...ef", x, weights(self))).mean(-2)
        made: Tensor = self.down(drop(y, self.rate, self.training))
        return made


def _own(m: _Mixture) -> Tensor:
    return torch.stack([up.get_parameter("weight") for up in m.ups])


def _drop(y: Tensor, rate: float, training: bool) -> Tensor:
    return F.dropout(y, rate, training)


def _mixture(weights: Callable[[_Mixture], Tensor] = _own, drop: Callable[..., Tensor] = _drop) -> Subject:
    return Subject(kind="feed_forward", build=lambda c: _Mixture(c, weights, drop), forward=lambda m, x: m(x),
                   declares={"structure": "other"})  # fmt: skip


@fault(
    "PA-copies-in-a-dict",
    "The stacked weights of experts are made once, when the model is built, and stand in a plain dict",
    killed_by=("parameters.registered",),
    cause="kept['up'] stands in a plain list or dict",
)
def copies_in_a_dict() -> Subject:
    return _mixture(weights=put(lambda m: m.kept["up"].to(m.down.weight.dtype), instead_of=_own))


@fault(
    "DR-not-told",
    "The function of dropout is not told whether the model trains, and drops by default",
    killed_by=("dropout.eval-deterministic",),
    cause="is not told self.training",
)
def dropout_is_not_told() -> Subject:
    return _mixture(drop=put(lambda y, rate, training: F.dropout(y, rate), instead_of=_drop))
