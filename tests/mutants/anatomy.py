"""Faults in one layer or one head of a whole model, which the layers around them hide: attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference.attention import MultiHeadAttention, as_pairwise, softmax
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import as_it_is, put
from veriformer.tests.mutants.parts import model

PRE = {"norm": "layer", "norm_placement": "pre", "activation": "relu"}


class OpenAttention(MultiHeadAttention):
    """Self-attention of a model in the open, to be changed by overriding one method."""

    def turned(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotary(query, positions), self.rotary(key, positions), value

    def shared(self, x: Tensor, is_value: bool) -> Tensor:
        return x.repeat_interleave(self.num_heads // x.shape[1], dim=1)

    def allowed(self, length: int) -> Tensor:
        """Return `[T, T]`, or `[H, T, T]`."""
        every = torch.ones(length, length, dtype=torch.bool)
        return every.tril() if self.causal else every

    def weights(self, scores: Tensor) -> Tensor:
        return softmax(scores)

    def forward(  # type: ignore[override]
        self, x: Tensor, *, attention_mask: Tensor | None, positions: Tensor, cache: None = None
    ) -> tuple[Tensor, Tensor]:
        query = self._split(self.q_proj(x), self.num_heads)
        key, value = (self._split(p(x), self.num_key_value_heads) for p in (self.k_proj, self.v_proj))
        query, key, value = self.turned(query, key, value, positions)
        key, value = self.shared(key, False), self.shared(value, True)
        scores = query @ key.mT * (self.d_head**-0.5 if self.scale is None else self.scale)
        if (bias := self.position_bias(positions, positions)) is not None:
            scores = scores + bias.to(scores.dtype)
        if (mask := as_pairwise(attention_mask, len(x), x.shape[1], x.shape[1])) is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = self.weights(scores.masked_fill(~self.allowed(x.shape[1]), -torch.inf))
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2)), weights


def attending(wrong: type[OpenAttention], *layers: int) -> Callable[[Any], None]:
    """Return a change of a model: the self-attention of these layers, of all if none is named."""

    def change(built: Any) -> None:
        for number, layer in enumerate(built.stack.layers):
            if number in layers or not layers:
                layer.attention.__class__ = wrong

    return change


def each_attention(built: Any) -> list[Any]:
    return [layer.attention for layer in built.stack.layers]


@fault(
    "anatomy-head-scale",
    "One head of one layer is scaled twice",
    killed_by=("anatomy.scale",),
    cause="of head 1 in stack.layers.1.attention alone is 0.5 times the right one: it is scaled once more",
)
def one_head_scaled_twice() -> Subject:
    class Twice(OpenAttention):
        def turned(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scale = torch.ones(self.num_heads, 1, 1, dtype=query.dtype)
            scale[1] = self.d_head**-0.5
            return query * scale, key, value

    return model(attending(Twice, 1), PRE, architecture="decoder")


@fault(
    "anatomy-layer-unscaled",
    "The scale is missing in one layer",
    killed_by=("anatomy.scale",),
    cause="in stack.layers.1.attention alone is 2 times the right one: it is not scaled at all",
)
def one_layer_unscaled() -> Subject:
    return model(lambda m: setattr(each_attention(m)[1], "scale", 1.0), PRE, architecture="decoder")


@fault(
    "anatomy-scaled-twice",
    "A decoder scales its queries, and its scores again",
    killed_by=("anatomy.scale",),
    cause="of every head is 1/d_head: the scores are scaled twice",
)
def decoder_scaled_twice() -> Subject:
    class Twice(OpenAttention):
        def turned(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = super().turned(query, key, value, positions)
            return query * self.d_head**-0.5, key, value

    return model(attending(Twice), PRE, architecture="decoder", positions="rotary")


@fault(
    "anatomy-temperature",
    "One layer's softmax has a temperature of 1.1",
    killed_by=("anatomy.scale",),
    cause="is 0.9091 times the right one",
)
def temperature() -> Subject:
    class Cooler(OpenAttention):
        def weights(self, scores: Tensor) -> Tensor:
            return softmax(scores / 1.1)

    return model(attending(Cooler, 0), {"attention_scale": "1/sqrt(d_head)"})


@fault(
    "anatomy-cross-unscaled",
    "Attention to the memory is not scaled",
    killed_by=("anatomy.scale",),
    cause="cross_attention alone is 2 times the right one: it is not scaled at all",
)
def cross_attention_unscaled() -> Subject:
    return model(lambda m: setattr(m.decoder.layers[1].cross_attention, "scale", 1.0), architecture="encoder_decoder")


@fault(
    "anatomy-over-queries",
    "One layer of an encoder normalises over the queries",
    killed_by=("anatomy.softmax",),
    cause="the softmax in stack.layers.1.attention runs over the queries",
)
def over_the_queries() -> Subject:
    class OverQueries(OpenAttention):
        def weights(self, scores: Tensor) -> Tensor:
            return softmax(scores, dim=-2)

    return model(attending(OverQueries, 1))


@fault(
    "anatomy-lost-weight",
    "One layer's softmax has 1 more below the line: a part of it goes nowhere",
    killed_by=("anatomy.softmax",),
    cause="of the softmax in stack.layers.0.attention goes to no key",
)
def lost_weight() -> Subject:
    class Leaking(OpenAttention):
        def weights(self, scores: Tensor) -> Tensor:
            exponentials = scores.exp()
            return exponentials / (1 + exponentials.sum(-1, keepdim=True))

    return model(attending(Leaking, 0), {"sink": False}, architecture="decoder", positions="alibi")


@fault(
    "anatomy-weights-more",
    "One layer's weights are multiplied by 1.1, as a dropout that does not know its rate does",
    killed_by=("anatomy.softmax",),
    cause="are those of a softmax times 1.1",
)
def more_weight() -> Subject:
    class More(OpenAttention):
        def weights(self, scores: Tensor) -> Tensor:
            return softmax(scores) * 1.1

    return model(attending(More, 1), architecture="decoder")


@fault(
    "anatomy-groups",
    "Keys are repeated head by head, values group by group",
    killed_by=("anatomy.softmax",),
    cause="dealt to the heads in two different orders in stack.layers.1.attention",
)
def groups_dealt_differently() -> Subject:
    class Dealt(OpenAttention):
        def shared(self, x: Tensor, is_value: bool) -> Tensor:
            return x.repeat(1, self.num_heads // x.shape[1], 1, 1) if is_value else super().shared(x, is_value)

    made = model(attending(Dealt, 1), PRE, architecture="decoder", num_key_value_heads=2)
    return replace(made, domain={"num_heads": [4], "d_model": [16, 24]})


@fault(
    "anatomy-not-itself",
    "In one layer of a decoder queries do not see themselves",
    killed_by=("anatomy.mask",),
    cause="queries do not see themselves in stack.layers.1.attention",
)
def not_itself() -> Subject:
    class Before(OpenAttention):
        def allowed(self, length: int) -> Tensor:
            before = super().allowed(length).tril(-1)
            before[0, 0] = True
            return before

    return model(attending(Before, 1), PRE, architecture="decoder")


@fault(
    "anatomy-causal-layer",
    "One layer of an encoder has a causal mask",
    killed_by=("anatomy.mask",),
    cause="a causal mask hides the later keys in stack.layers.0.attention",
)
def causal_layer() -> Subject:
    return model(lambda m: setattr(each_attention(m)[0], "causal", True))


@fault(
    "anatomy-head-mask",
    "One head of one layer sees three keys alone",
    killed_by=("anatomy.mask",),
    cause="the mask of head 1 in stack.layers.0.attention is another one",
)
def head_mask() -> Subject:
    class Near(OpenAttention):
        def allowed(self, length: int) -> Tensor:
            whole = super().allowed(length)
            return torch.stack([whole.triu(-2) if head == 1 else whole for head in range(self.num_heads)])

    return model(attending(Near, 0), PRE, architecture="decoder")


@fault(
    "anatomy-window",
    "The windows of a stack are one wider than declared",
    killed_by=("anatomy.mask",),
    cause="queries see the last 10 keys, where 9 are declared",
    citation="huggingface/transformers#29623",
)
def wide_window() -> Subject:
    width = put(10, instead_of=9)

    class Near(OpenAttention):
        def allowed(self, length: int) -> Tensor:
            return super().allowed(length).triu(1 - width)

    plain = model(as_it_is, {"window": 9}, architecture="decoder")

    def build(config: Any) -> nn.Module:
        assert plain.build is not None
        built: nn.Module = plain.build(config)
        attending(Near)(built)
        return built

    return replace(plain, build=build)
