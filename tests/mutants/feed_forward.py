"""Faults of feed-forward networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class Gated(nn.Module):
    """SwiGLU, combined by what a fault exchanges."""

    def __init__(self, width: int, inner: int, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.combine(self.gate(x), self.up(x)))


class Plain(nn.Module):
    """Two maps and an activation."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


_ACTIVATIONS: dict[str, Any] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def gated(combine: Callable[[Tensor, Tensor], Tensor]) -> Subject:
    combine = put(combine, instead_of=lambda gate, up: functional.silu(gate) * up)
    return Subject(kind="feed_forward", build=lambda c: Gated(c.d_model, c.d_ff, combine), forward=lambda m, x: m(x),
                   declares={"activation": "swiglu", "bias": True})  # fmt: skip


def plain(
    activation: Callable[[Tensor], Tensor], name: str, forward: Callable[..., Tensor] | None = None, **given: bool
) -> Subject:
    if name in _ACTIVATIONS:
        activation, forward, given = put((activation, forward, given), instead_of=(_ACTIVATIONS[name], None, {}))
    return Subject(kind="feed_forward", build=lambda c: Plain(c.d_model, c.d_ff, activation, **given),
                   forward=forward or (lambda m, x: m(x)), declares={"activation": name, "bias": True})  # fmt: skip


@fault(
    "FF01",
    "SwiGLU parenthesis slip",
    killed_by=("ffn.definition",),
    cause="parenthesis",
)
def parenthesis() -> Subject:
    return gated(lambda gate, up: functional.silu(gate * up))


@fault(
    "FF02-maps",
    "'swiglu' silently maps to plain SiLU",
    killed_by=("ffn.definition", "ffn.parameters"),
    cause="maps of",
)
def not_gated() -> Subject:
    return plain(functional.silu, "swiglu")


@fault("FF04", "GELU tanh formula missing the leading x", killed_by=("ffn.definition",), cause="not that of gelu_tanh")
def no_leading_x() -> Subject:
    return plain(lambda x: 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), "gelu_tanh")


@fault("FF05", "tanh for erf in GELU", killed_by=("ffn.definition",), cause="gelu_tanh")
def tanh_for_erf() -> Subject:
    return plain(lambda x: functional.gelu(x, approximate="tanh"), "gelu")


@fault(
    "FF07-alone", "FFN/reshape mixes positions", killed_by=("ffn.position-wise",), cause="among others than by itself"
)
def mixed_positions() -> Subject:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return model(x.reshape(batch, width, length).transpose(1, 2))

    return plain(functional.relu, "relu", forward)


@fault("ffn-affine", "The activation is left out", killed_by=("ffn.nonlinear", "ffn.definition"), cause="no activation")
def affine() -> Subject:
    return plain(lambda x: x, "relu")


@fault(
    "ffn-shifted-gate",
    "The gate of unit i opens unit i + 1",
    killed_by=("ffn.neuron-permutation", "ffn.definition"),
    cause="permuting the hidden units",
)
def shifted_gate() -> Subject:
    return gated(lambda gate, up: functional.silu(gate) * up.roll(1, dims=-1))


@fault("ffn-no-bias", "Biases are declared and missing", killed_by=("ffn.parameters",), cause="without biases")
def no_bias() -> Subject:
    return plain(functional.relu, "relu", bias=False)
