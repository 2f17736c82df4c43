"""Wrong formulas of feed-forward networks: other activations, other gates, a bias that is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from veriformer.properties.definitions.feed_forward import ACTIVATIONS, Reading

Activation = Callable[[Tensor], Tensor]

_OTHERS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "the sigmoid form of gelu, x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "leaky relu (0.01)": functional.leaky_relu,
    "elu": functional.elu,
    "selu": functional.selu,
    "the square of relu": lambda x: x.clamp(min=0).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "hard swish": functional.hardswish,
    "relu6": functional.relu6,
    "a softmax over the hidden units": lambda x: x.softmax(-1),
    "the normal distribution function without its factor x": lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu without its factor 1/2": lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu whose error function lacks 1/sqrt(2)": lambda x: 0.5 * x * (1 + torch.erf(x)),
    "the tanh form of gelu without its cubic term": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x)),
    "no activation at all": lambda x: x,
}


def _tanh_gelu(outer: float = math.sqrt(2 / math.pi), cubic: float = 0.044715, power: int = 3) -> Activation:
    return lambda x: 0.5 * x * (1 + torch.tanh(outer * (x + cubic * x**power)))


_OF_GELU: Mapping[str, Activation] = {
    "the tanh form of gelu with a square for its cube": _tanh_gelu(power=2),
    **{
        f"the tanh form of gelu with {words} for sqrt(2/pi)": _tanh_gelu(outer=value)
        for words, value in (
            ("sqrt(2 pi)", math.sqrt(2 * math.pi)), ("sqrt(2)/pi", math.sqrt(2) / math.pi), ("2/pi", 2 / math.pi),
            ("sqrt(pi/2)", math.sqrt(math.pi / 2)), ("sqrt(2)/2", math.sqrt(2) / 2), ("1", 1.0),
            ("sqrt(2)", math.sqrt(2)), ("sqrt(pi)/2", math.sqrt(math.pi) / 2),
        )
    },
    **{
        f"the tanh form of gelu with {value} for 0.044715": _tanh_gelu(cubic=value)
        for value in (0.44715, 0.0044715, 0.04715, 0.0447, 0.044175, 0.47715, 0.004715)
    },
}  # fmt: skip


def _without(pair: tuple[Tensor, Tensor | float]) -> tuple[Tensor, Tensor | float]:
    return pair[0], 0.0


def _formulas(reading: Reading, x: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    weight, shift = reading.down
    inner = [x.double() @ w.T + b for w, b in reading.up]
    named = {**{other: act for other, act in ACTIVATIONS.items() if other != "swiglu"}, **_OTHERS, **_OF_GELU}

    def down(hidden: Tensor) -> Tensor:
        return hidden @ weight.T + shift

    if len(inner) == 2:
        for other, act in named.items():
            if other != "silu":
                yield f"the gate has {other} instead of silu", down(act(inner[0]) * inner[1])
        silu = functional.silu
        yield (
            "silu is taken of the product gate * value instead of the gate: a parenthesis slip",
            down(silu(inner[0] * inner[1])),
        )
        yield "gate and value are added, not multiplied", down(silu(inner[0]) + inner[1])
        yield "silu is taken of gate and value both", down(silu(inner[0]) * silu(inner[1]))
        yield "the gate alone goes on: the value is not multiplied in", down(silu(inner[0]))
        yield "the value alone goes on: the gate is not used", down(inner[1])
        return
    act = ACTIVATIONS[name]
    for other, formula in named.items():
        if other != name:
            yield f"it computes {other}", down(formula(inner[0]))
    yield f"{name} is applied twice", down(act(act(inner[0])))
    yield f"{name} is applied once more, to the output", act(down(act(inner[0])))
    yield f"{name} is applied to the output, not between the maps", act(down(inner[0]))
    yield (
        f"{name} is applied to the input, not between the maps",
        down(act(x.double()) @ reading.up[0][0].T + reading.up[0][1]),
    )
    for words, changed in (
        ("the bias of the first map is not added", Reading((_without(reading.up[0]),), reading.down)),
        ("the bias of the second map is not added", Reading(reading.up, _without(reading.down))),
        ("neither bias is added", Reading((_without(reading.up[0]),), _without(reading.down))),
    ):
        yield words, changed(x, name)
    yield from (
        (words, down(hidden))
        for tile in (1, 2, 4, 8, 16, 32)
        if tile < x.shape[-1]
        for words, hidden in _of_partial_sums(act, name, x.double(), *reading.up[0], tile)
    )
    yield "the input is added to the output: a residual connection stands inside", x.double() + down(act(inner[0]))
    first, bias = reading.up[0]
    yield "the bias of the first map is added after the activation", down(act(x.double() @ first.T) + bias)


def _of_partial_sums(
    act: Activation, name: str, x: Tensor, weight: Tensor, bias: Tensor | float, tile: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield what comes of an activation before the sum over the input channels is done, so many channels at a time."""
    parts = [x[..., k : k + tile] @ weight[:, k : k + tile].T for k in range(0, x.shape[-1], tile)]
    running = torch.zeros_like(parts[0]) + bias
    for part in parts:
        running = act(running + part)
    words = f"{name} is applied to partial sums, of {tile} input channels at a time"
    yield f"{words}: inside the loop that adds them up, not behind it", running
    whole = sum((act(part) for part in parts), torch.zeros_like(parts[0]))
    yield f"{words}, and these are added up then", whole + bias
    yield f"{words}, each with the bias, and these are added up then", sum((act(p + bias) for p in parts), 0 * whole)


def feed_forward_cause(readings: list[Reading], x: Tensor, name: str, got: Tensor, bound: float) -> str | None:
    """Name the one wrong formula that gives an output.

    Args:
        readings: ways to read the maps for the declared activation.
        x: `[B, T, D]`.
        name: of the declared activation.
        got: `[B, T, D]`, float64.
        bound: largest difference that is rounding.
    """
    right = [reading(x, name) for reading in readings]
    fits = []
    for reading in readings:
        for words, guess in _formulas(reading, x, name):
            told_apart = all(float((guess - one).abs().max()) > 2 * bound for one in right)
            if told_apart and float((guess - got).abs().max()) <= bound and words not in fits:
                fits.append(words)
    if len(fits) == 1:
        return fits[0]
    if fits:
        return None
    for one in right:
        ratio = got / one
        if float((ratio - ratio.median()).abs().max()) < 1e-4 and abs(float(ratio.median()) - 1) > 1e-3:
            return f"the output is {float(ratio.median()):.4g} times that of {name}"
    return None
