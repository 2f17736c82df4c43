"""Faults of causal masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.reference import attention as reference_attention
from veriformer.reference.attention import MultiHeadAttention
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import CausalLayer, SelfAttention, layer, model


class _Shifted(MultiHeadAttention):
    """Causal attention whose mask lets `ahead` future keys through."""

    ahead = 1

    def forward(self, x: Tensor, memory: Tensor | None = None, **given: Any) -> tuple[Tensor, Tensor]:
        self.causal = False
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(self.ahead)
        padding = reference_attention.as_pairwise(given.pop("attention_mask", None), len(x), length, length)
        mask = allowed[None, None] if padding is None else allowed & padding
        return super().forward(x, memory, attention_mask=mask.expand(len(x), 1, -1, -1), **given)


def _with_attention(cls: type[MultiHeadAttention]) -> Any:
    def change(built: nn.Module) -> None:
        for one in built.stack.layers:
            one.attention.__class__ = cls

    return change


@fault(
    "CM01",
    "Causal mask lets through one future token (diagonal off by one)",
    citation="documented bug CM01: tril(1) / triu(2)",
    killed_by=(
        "causality.no-future-influence",
        "causality.no-future-gradient",
        "causality.prefix-consistency",
        "causality.first-token",
        "causality.random-tokens",
    ),
    cause="off by one",
)
def one_ahead() -> Subject:
    return model(_with_attention(_Shifted), architecture="decoder")


@fault(
    "CM02",
    "Diagonal masked too: token cannot attend to itself, row 0 empty",
    killed_by=("causality.no-future-gradient",),
    cause="diagonal is masked too",
)
def strict() -> Subject:
    class Wrong(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            return torch.ones(length, length, dtype=torch.bool).tril(-1)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(x, attention_mask) - x  # without the residual that would hide it

    return layer(Wrong, causal=True, positions="none")


@fault(
    "CM04",
    "Causal mask silently dropped where gradients are off",
    killed_by=("causality.no-future-influence", "causality.prefix-consistency"),
    cause="only this one leaks",
)
def dropped_on_one_path() -> Subject:
    class Wrong(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            right = super().allowed(length)
            return right if torch.is_grad_enabled() else torch.ones_like(right)

    return layer(Wrong, causal=True, positions="none")


@fault(
    "CM04-dropout",
    "Causal mask dropped on the path with dropout",
    killed_by=("causality.no-future-gradient",),
    cause="only this one leaks",
)
def dropped_with_dropout() -> Subject:
    class Wrong(CausalLayer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.dropout = nn.Dropout(config.dropout)

        def allowed(self, length: int) -> Tensor:
            right = super().allowed(length)
            return torch.ones_like(right) if self.training and self.dropout.p > 0 else right

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.dropout(super().forward(x, attention_mask))

    return layer(Wrong, causal=True, positions="none")


@fault(
    "CM-long",
    "The mask buffer is one row short: the last position of the longest sequence sees nothing new",
    killed_by=("causality.no-future-gradient",),
    cause="shorter than the sequence",
)
def one_length_only() -> Subject:
    class Wrong(CausalLayer):
        def allowed(self, length: int) -> Tensor:
            allowed = super().allowed(length)
            if length == self.heads:  # a collision of the length with the number of heads, as broadcasting makes it
                allowed = torch.ones_like(allowed)
            return allowed

    return layer(Wrong, causal=True, positions="none")


@fault(
    "CM19",
    "Normalising over the time axis leaks the future through a causal decoder",
    killed_by=("causality.no-future-influence", "causality.first-token", "causality.prefix-consistency"),
    cause="behind stack.final_norm",
)
def norm_over_time() -> Subject:
    class OverTime(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(dim=1, keepdim=True)
            return self.weight * centred / (centred.square().mean(dim=1, keepdim=True) + self.eps).sqrt() + self.bias

    def change(built: nn.Module) -> None:
        built.stack.final_norm = OverTime(built.stack.final_norm)

    return model(change, architecture="decoder")


class WindowedLayer(CausalLayer):
    """A causal layer that sees the last three tokens."""

    def allowed(self, length: int) -> Tensor:
        return super().allowed(length).triu(-2)


@fault(
    "CM16",
    "Sliding window not applied",
    killed_by=("causality.window",),
    cause="not applied",
)
def window_ignored() -> Subject:
    return layer(put(CausalLayer, instead_of=WindowedLayer), causal=True, positions="none", window=3)


@fault("CM16-one", "Sliding window wider by one than declared", killed_by=("causality.window",), cause="window")
def window_off_by_one() -> Subject:
    class Wrong(WindowedLayer):
        def allowed(self, length: int) -> Tensor:
            return CausalLayer.allowed(self, length).triu(-3)

    return layer(Wrong, causal=True, positions="none", window=3)


@fault(
    "CM17-encoder",
    "A causal hint is applied to an encoder that declares itself bidirectional",
    killed_by=("causality.declared-bidirectional-is",),
    cause="a causal mask is applied",
)
def causal_encoder() -> Subject:
    return layer(put(CausalLayer, instead_of=SelfAttention), causal=False, positions="none")


@fault(
    "CM-cross",
    "The target of an encoder-decoder sees its future",
    killed_by=("causality.no-future-influence", "causality.no-future-gradient"),
    cause="behind decoder.layers.0.attention",
)
def leaky_pair() -> Subject:
    def change(built: nn.Module) -> None:
        for one in built.decoder.layers:
            one.attention.causal = False

    return model(change, architecture="encoder_decoder")
