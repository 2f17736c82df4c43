"""Faults of positions inside a whole model, which the layers around them hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.position_bias import AlibiBias
from veriformer.reference.positions import LearnedPositions, SinusoidalPositions
from veriformer.reference.rotary import Rotary
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.anatomy import PRE, OpenAttention, attending, each_attention
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import SelfAttention, model, self_attention


def _alibi(change: Callable[[AlibiBias], None]) -> Subject:
    def alter(built: Any) -> None:
        change(each_attention(built)[0].position_bias)

    return model(alter, PRE, architecture="decoder", positions="alibi")


@fault(
    "anatomy-alibi-sign",
    "The slopes of ALiBi have the other sign",
    killed_by=("anatomy.positions",),
    cause="the negative of the right ones",
)
def alibi_sign() -> Subject:
    return _alibi(lambda bias: bias.slopes.neg_())


@fault(
    "anatomy-alibi-slopes",
    "The slopes of ALiBi begin at i = 0: 2^(-8 (i - 1) / H)",
    killed_by=("anatomy.positions",),
    cause="with i from 0",
)
def alibi_slopes_from_zero() -> Subject:
    return _alibi(lambda bias: bias.slopes.mul_(2 ** (8 / len(bias.slopes))))


@fault(
    "anatomy-alibi-one-slope",
    "All heads have the slope of the first",
    killed_by=("anatomy.positions",),
    cause="the head's number is missing",
)
def one_slope() -> Subject:
    return _alibi(lambda bias: bias.slopes.fill_(float(bias.slopes[0])))


class _Turned(SelfAttention):
    """Causal attention whose queries and keys are normalised, and then turned."""

    def __init__(self, config: DrawnConfig) -> None:
        super().__init__(config)
        self.rotary, self.norms = (
            Rotary(self.width - self.width % 2),
            nn.ModuleList(nn.LayerNorm(self.width) for _ in "qk"),
        )

    def turned(self, x: Tensor, norm: nn.Module) -> Tensor:
        return self.rotary(norm(x), torch.arange(x.shape[-2], device=x.device))

    def scores(self, x: Tensor) -> Tensor:
        q, k = (self.turned(self.split(f(x)), n) for f, n in zip((self.q, self.k), self.norms, strict=True))
        later = torch.ones(2 * (x.shape[1],), dtype=torch.bool, device=x.device).triu(1)
        return (q @ k.mT * self.width**-0.5).masked_fill(later, -torch.inf)


class _NormedLast(_Turned):
    def turned(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(self.rotary(x, torch.arange(x.shape[-2], device=x.device)))


@fault(
    "anatomy-rotary-normed",
    "Queries and keys are normalised behind their rotation",
    killed_by=("anatomy.positions",),
    cause="a mean or gains stands behind the rotation",
)
def normed_behind_the_rotation() -> Subject:
    facts = {"causal": True, "positions": "rotary", "query_key_norm": True}
    return replace(self_attention(_NormedLast, **facts), build=put(_NormedLast, instead_of=_Turned), projections=None)


@fault(
    "anatomy-rotary-base",
    "Rotary positions of base 1000 in a decoder declared to have 10000",
    killed_by=("anatomy.positions",),
    cause="are those of base 1000",
)
def rotary_base() -> Subject:
    def change(built: Any) -> None:
        for attention in each_attention(built):
            attention.rotary.base = 1000.0

    return model(change, {"base": 10000.0}, architecture="decoder", positions="rotary")


@fault(
    "anatomy-keys-still",
    "In one layer keys are not turned",
    killed_by=("anatomy.positions",),
    cause="in stack.layers.1.attention queries are turned and keys are not",
)
def keys_stay() -> Subject:
    class Still(OpenAttention):
        def turned(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.rotary(query, positions), key, value

    return model(attending(Still, 1), architecture="decoder", positions="rotary")


@fault(
    "anatomy-values-turned",
    "In one layer values are turned, too",
    killed_by=("anatomy.positions",),
    cause="the rotation is applied to the values in stack.layers.0.attention",
)
def values_turned() -> Subject:
    class Turning(OpenAttention):
        def turned(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return (*super().turned(query, key, value, positions)[:2], self.rotary(value, positions))

    return model(attending(Turning, 0), architecture="decoder", positions="rotary")


@fault(
    "anatomy-half-turned",
    "Half of the channels of a head are turned, none declared to pass",
    killed_by=("anatomy.positions",),
    cause="channels are turned in stack.layers.0.attention",
)
def half_turned() -> Subject:
    class Half(Rotary):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            first, rest = x.chunk(2, dim=-1)
            return torch.cat([Rotary(first.shape[-1]).forward(first, positions), rest], dim=-1)

    def change(built: Any) -> None:
        each_attention(built)[0].rotary.__class__ = Half

    made = model(change, architecture="decoder", positions="rotary")
    return replace(made, domain={"num_heads": [2], "d_model": [8, 16]})


def _sinusoids(facts: dict[str, Any], change: Callable[[SinusoidalPositions], object]) -> Subject:
    return model(lambda m: change(m.embedding.positions), facts)


@fault(
    "anatomy-sinusoid-base",
    "Sinusoids of base 1000 in an encoder declared to have 10000",
    killed_by=("anatomy.positions",),
    cause="the table is that of base 1000, not 10000",
)
def sinusoid_base() -> Subject:
    return _sinusoids({"base": 10000.0}, lambda positions: setattr(positions, "base", 1000.0))


@fault(
    "anatomy-sinusoid-layout",
    "Sines first, then cosines, in an encoder declared to have them interleaved",
    killed_by=("anatomy.positions",),
    cause="its channels are not laid out as declared (interleaved)",
)
def sinusoid_layout() -> Subject:
    class Halves(SinusoidalPositions):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            table = super().forward(torch.zeros_like(x), positions)
            return x + torch.cat([table[..., 0::2], table[..., 1::2]], dim=-1)

    return _sinusoids({"layout": "interleaved"}, lambda positions: setattr(positions, "__class__", Halves))


@fault(
    "anatomy-offset",
    "Positions begin at row 2 of the table, and 0 is declared",
    killed_by=("anatomy.positions",),
    cause="positions begin at row 2 of embedding.positions.table.weight instead of row 0",
)
def begins_at_two() -> Subject:
    class FromTwo(LearnedPositions):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return super().forward(x, positions + 2)

    return model(
        lambda m: setattr(m.embedding.positions, "__class__", FromTwo),
        {"position_offset": 0, "max_len": 20},
        architecture="decoder",
        positions="learned",
    )


@fault(
    "anatomy-embedding-scale",
    "Embeddings enter as they are, and sqrt(d_model) is declared",
    killed_by=("anatomy.positions",),
    cause="token embeddings are multiplied by 1, sqrt(d_model)",
)
def embeddings_unscaled() -> Subject:
    return model(
        lambda m: setattr(m.embedding, "scale", 1.0), {"embedding_scale": True}, architecture="decoder", positions="t5"
    )


@fault(
    "anatomy-buckets",
    "A decoder's T5 bias has two-sided buckets: half of them are never used",
    killed_by=("anatomy.positions",),
    cause="where one-sided ones are right",
)
def two_sided_buckets() -> Subject:
    def change(built: Any) -> None:
        built.stack.layers[0].attention.position_bias.bidirectional = True  # one bias serves all layers

    facts = {"num_buckets": 8, "max_distance": 20}
    return model(change, PRE | facts, architecture="decoder", positions="t5", **facts)
