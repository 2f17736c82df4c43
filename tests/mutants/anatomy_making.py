"""Faults of what parts of a model are made of: tokens that are one, missing norms, skips from the other side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.attention import softmax
from veriformer.reference.blocks import Sublayer
from veriformer.reference.model import build
from veriformer.reference.position_bias import T5Bias
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.anatomy import PRE, OpenAttention, attending
from veriformer.tests.mutants.mending import as_it_is, put, put_class
from veriformer.tests.mutants.parts import model, sized

_GPT: dict[str, Any] = {"architecture": "decoder", "positions": "learned"}


@fault(
    "token-rows",
    "Token ids are clamped one too low, so that the last one is embedded as its neighbour",
    killed_by=("causality.first-token",),
    cause="are embedded alike",
)
def clamped_ids() -> Subject:
    class Clamped(nn.Module):
        def __init__(self, inner: nn.Embedding) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor) -> Tensor:
            embedded: Tensor = self.inner(tokens.clamp(max=self.inner.num_embeddings - 2))
            return embedded

    def change(built: Any) -> None:
        built.embedding.tokens = Clamped(built.embedding.tokens)

    return model(change, **_GPT)


@fault(
    "anatomy-no-query-norm",
    "Queries and keys are declared to be normalised, and are not",
    killed_by=("anatomy.softmax",),
    cause="are not normalised in",
)
def no_query_key_norm() -> Subject:
    return model(as_it_is, {"query_key_norm": True}, **_GPT)


@fault(
    "anatomy-skip-behind-norm",
    "The last feed-forward network's skip starts behind its norm",
    killed_by=("anatomy.residual",),
    cause="starts on the other side of the norm",
)
def skip_behind_the_norm() -> Subject:
    class FromNorm(Sublayer):
        def leave(self, x: Tensor, change: Tensor) -> Tensor:
            return super().leave(self.norm_in(x), change)

    def change(built: Any) -> None:
        built.stack.layers[-1].around_feed_forward.__class__ = FromNorm

    return model(change, **_GPT)


@fault(
    "anatomy-raw-parallel",
    "In a parallel layer the feed-forward network takes the stream past the one norm of both",
    killed_by=("anatomy.residual",),
    cause="feed_forward.down is handed the stream itself",
)
def raw_parallel() -> Subject:
    class Raw(Sublayer):
        def enter(self, x: Tensor) -> Tensor:
            return x

    def change(built: Any) -> None:
        for layer in built.stack.layers:
            layer.around_feed_forward.__class__ = put_class(Raw)

    return model(change, parallel=True, **_GPT)


@fault(
    "t5-other-sign",
    "Buckets of T5 are asked for queries less keys: all of the past falls into the first",
    killed_by=("parameters.all-used",),
    cause="all that counts is given one row",
)
def buckets_of_the_future() -> Subject:
    class Turned(T5Bias):
        def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
            turned: Tensor = super().forward(-query_positions, -key_positions)
            return turned

    def change(built: Any) -> None:
        built.stack.layers[0].attention.position_bias.__class__ = put_class(Turned)  # one bias serves all layers

    return model(change, architecture="decoder", positions="t5")


@fault(
    "anatomy-cap-order",
    "Scores are capped before they are scaled",
    killed_by=("anatomy.scale",),
    cause="the cap acts before the scale",
)
def capped_before_the_scale() -> Subject:
    class Capped(OpenAttention):
        def capped(self, scores: Tensor) -> Tensor:
            return 5 * (scores / 5).tanh()

        def weights(self, scores: Tensor) -> Tensor:
            return softmax(torch.where(scores.isfinite(), self.capped(scores), scores))

    class TooEarly(Capped):
        def capped(self, scores: Tensor) -> Tensor:
            scale = self.d_head**-0.5
            return scale * super().capped(scores / scale)

    change = attending(put(TooEarly, instead_of=Capped))

    def make(config: DrawnConfig) -> nn.Module:
        built = build(sized(config, architecture="decoder"))
        change(built)
        return built

    return Subject(
        kind="decoder",
        build=make,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares=PRE | {"causal": True, "positions": "sinusoidal", "soft_cap": 5.0},
    )
