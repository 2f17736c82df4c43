"""The right parts that faults are made from by changing one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.tests.mutants.mending import as_it_is, put, put_class

Combine = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def masked(scores: Tensor, allow: Tensor) -> Tensor:
    """Return the right softmax of scores `[B, H, T, S]` under a mask; an empty row gives zeros."""
    return scores.masked_fill(~allow, -torch.inf).softmax(dim=-1).nan_to_num(0.0)


def attention(combine: Combine, name: str = "attention", **given: Any) -> Subject:
    """Return a subject of kind attention whose output is `combine(raw scores, values, allow, d_head, heads)`."""
    combine = put(combine, instead_of=lambda s, v, allow, d, h: masked(s * d**-0.5, allow) @ v)

    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool) if attention_mask is None else attention_mask
        if causal:
            allow = allow & torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return combine(scores, v, allow, q.shape[-1], q.shape[1])

    return Subject(kind="attention", forward=forward, name=name, **given)


def sized(config: DrawnConfig, **choices: Any) -> Config:
    """Return a reference configuration of the drawn sizes."""
    return Config(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        num_layers=config.num_layers,
        max_len=config.max_len,
        num_classes=config.num_classes,
        dropout=config.dropout,
        **choices,
    )


def model(change: Callable[[nn.Module], object], facts: dict[str, Any] | None = None, **choices: Any) -> Subject:
    """Return a reference model, altered by `change(model)` after it was built."""
    change = change if change is as_it_is else put(change, instead_of=as_it_is)

    def make(config: DrawnConfig) -> nn.Module:
        built = build(sized(config, **choices))
        change(built)
        return built

    kind = choices.get("architecture", "encoder")
    if kind == "encoder_decoder":
        return Subject(
            kind=kind,
            build=make,
            forward=lambda m, source, target, source_mask=None, target_mask=None: m(
                source, target, source_mask, target_mask
            ),
            declares={"positions": choices.get("positions", "sinusoidal"), **(facts or {})},
        )
    causal = {} if kind == "classifier" else {"causal": kind == "decoder"}
    return Subject(
        kind=kind,
        build=make,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={**causal, "positions": choices.get("positions", "sinusoidal"), **(facts or {})},
    )


class SelfAttention(nn.Module):
    """Multi-head self-attention in the open, to be changed by overriding one method."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__()
        self.heads, self.width = config.num_heads, config.d_head
        self.q, self.k, self.v, self.o = (nn.Linear(config.d_model, config.d_model) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def values(self, x: Tensor) -> Tensor:
        return self.v(x)

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        return scores.softmax(dim=-1).nan_to_num(0.0)

    def scores(self, x: Tensor) -> Tensor:
        return self.split(self.q(x)) @ self.split(self.k(x)).transpose(-2, -1) * self.width**-0.5

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.o(self.merge(self.weights(self.scores(x), attention_mask) @ self.split(self.values(x))))


def projections(model: Any) -> dict[str, Tensor]:
    """Return the projections of a `SelfAttention`."""
    parts = {name: getattr(model, name).weight for name in "qkvo"}
    return parts | {f"{name}_bias": getattr(model, name).bias for name in "qkvo"}


def self_attention(cls: type[nn.Module] = SelfAttention, weights: bool = False, **facts: Any) -> Subject:
    """Return a subject of kind self_attention built from a class."""
    return Subject(
        kind="self_attention",
        build=put_class(cls),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        projections=projections,
        weights=(lambda m, x: m.weights(m.scores(x), None)) if weights else None,
        declares={"causal": False, "positions": "none", "bias": True, **facts},
    )


class CausalLayer(SelfAttention):
    """A causal layer: x + attention(x) under `allowed(T)`."""

    def allowed(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x).masked_fill(~self.allowed(x.shape[1]), -torch.inf)
        return x + self.o(self.merge(self.weights(scores, attention_mask) @ self.split(self.values(x))))


def layer(cls: type[nn.Module], **facts: Any) -> Subject:
    """Return a subject of kind layer built from a class."""
    return Subject(
        kind="layer",
        build=put_class(cls),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares=facts,
    )


def sinusoids(length: int, width: int) -> Tensor:
    """Return the right table `[T, D]`, sines and cosines interleaved."""
    omega = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * omega
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def positions(table: Callable[[int, int], Tensor], width: int = 16, **facts: Any) -> Subject:
    """Return a subject of kind positions from `table(length, width)`."""
    table = put(table, instead_of=sinusoids)
    return Subject(
        kind="positions",
        forward=lambda m, length: table(length, width),
        declares={"positions": "sinusoidal", **facts},
    )
