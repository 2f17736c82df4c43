"""Faults in models that are the textbook's but for one number: the twin is not equal, or cannot be built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.parts import model

_GPT: dict[str, Any] = {"architecture": "decoder", "activation": "gelu", "positions": "learned"}


class _Times(nn.Module):
    """A module whose output is multiplied by a number."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, *given: Any, **named: Any) -> Any:
        """Call it."""
        made = self.inner(*given, **named)
        return made * self.factor if isinstance(made, Tensor) else (made[0] * self.factor, *made[1:])


@fault(
    "twin-branch",
    "What the feed-forward network of the second layer gives is multiplied by 1.1",
    killed_by=("twin.equal",),
    cause="the stream is taken 1 times and the sublayer 1.1 times",
)
def louder_network() -> Subject:
    def change(built: Any) -> None:
        layer = built.stack.layers[-1]
        layer.feed_forward = _Times(layer.feed_forward, 1.1)

    return model(change, **_GPT)


@fault(
    "twin-embedding",
    "Embeddings are multiplied by d_model^0.4 instead of its root",
    killed_by=("twin.equal",),
    cause="embeddings are multiplied by",
)
def louder_embedding() -> Subject:
    def change(built: Any) -> None:
        built.embedding.scale = built.config.d_model**0.4

    return model(change, **_GPT)


@fault(
    "twin-values",
    "Values are multiplied by 1.1 before they are weighed",
    killed_by=("twin.equal",),
    cause="the values of",
)
def louder_values() -> Subject:
    def change(built: Any) -> None:
        for layer in built.stack.layers:
            layer.attention.v_proj = _Times(layer.attention.v_proj, 1.1)

    return model(change, **_GPT)


@fault(
    "twin-logits",
    "A model declared to be the textbook's caps its logits",
    killed_by=("twin.equal",),
    cause="every part is the textbook's, and the outputs differ",
)
def capped_logits() -> Subject:
    class Capped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 30 * torch.tanh(self.inner(x) / 30)

    def change(built: Any) -> None:
        built.output = Capped(built.output)

    return model(change, {"structure": "textbook"}, **_GPT)


@fault(
    "twin-gain",
    "The closing norm's gain is multiplied twice",
    killed_by=("twin.equal",),
    cause="the gain of stack.final_norm is not the parameter that it keeps",
)
def gain_twice() -> Subject:
    class SquaredNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight + self.bias * (1 - self.weight)

    def change(built: Any) -> None:
        built.stack.final_norm = SquaredNorm(built.config.d_model)

    return model(change, **_GPT)


@fault(
    "twin-activation",
    "The last layer alone has the tanh approximation of GELU",
    killed_by=("twin.equal",),
    cause="its layers are built in two ways",
)
def another_activation() -> Subject:
    def change(built: Any) -> None:
        built.stack.layers[-1].feed_forward.activation = lambda x: nn.functional.gelu(x, approximate="tanh")

    return model(change, {"structure": "textbook"}, **_GPT)
