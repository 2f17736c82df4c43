"""The activations of a model: what stands between one linear map and the next, told by its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from veriformer.properties.anatomy.sources import LINEAR
from veriformer.properties.anatomy.traced import Product, Traced, Value


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": functional.silu,
    "relu_squared": _relu_squared,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "mish": functional.mish,
    "identity": _identity,
}
"""Activations by name, as functions of the numbers that a linear map gave."""

_FEW = 8  # numbers that are compared first: most guesses are wrong in each
_BEHIND = 12  # linear maps before it that a product's operand may come from


@dataclass(frozen=True)
class Between:
    """What stands between two linear maps.

    Attributes:
        place: path of the module that computes the second.
        activation: key of `ACTIVATIONS`.
        is_gated: whether it is multiplied by what another linear map gave.
        width: numbers of a token there.
        inner: numbers of a token before the first map.
        outer: numbers of a token behind the second.
        when: number of the second product among the values.
        first: what the activation is given.
        other: what the result is multiplied by, where it is gated.
        is_on_both: whether the activation stands on what it is multiplied by, too.
    """

    place: str
    activation: str
    is_gated: bool
    width: int
    inner: int
    outer: int
    when: int
    first: Source
    other: Source | None
    is_on_both: bool = False


@dataclass(frozen=True)
class Source:
    """A part of what a linear map gave.

    Attributes:
        when: number of the value among the values.
        channels: of it.
    """

    when: int
    channels: range


def between_linear_maps(seen: Traced) -> list[Between]:
    """Return every activation that is seen in a forward, in order."""
    found: list[Between] = seen.once("activations", lambda: _between_linear_maps(seen))
    return found


def _between_linear_maps(seen: Traced) -> list[Between]:
    found = []
    products = {p.when: p for p in seen.products}
    for product in seen.products:
        if product.left.ndim > 2 and product.left.shape[:-2].numel() > 1:
            continue  # many products at once: no map of tokens by one matrix
        taken = product.left.cpu().double()
        before = [v for v in seen.values[: product.when] if _is_linear(v, taken)][-_BEHIND:]
        if told := _explained(taken, before, seen.limit):
            name, source, other, is_on_both = told
            first = map_behind(products, seen, source.when)
            if first is not None:
                sizes = (taken.shape[-1], first.left.shape[-1], product.output.shape[-1])
                is_gated = other is not None
                found.append(
                    Between(product.place, name, is_gated, *sizes, product.when, source, other, is_on_both=is_on_both)
                )
    return found


def _is_linear(value: Value, taken: Tensor) -> bool:
    return value.name in LINEAR and value.output.numel() in (taken.numel(), 2 * taken.numel())


def _explained(taken: Tensor, before: list[Value], limit: float) -> tuple[str, Source, Source | None, bool] | None:
    """Return the activation that explains `taken` best, what it was given, what multiplies it, and if it is on both.

    Float32 does not tell the two forms of GELU apart by the limit alone: the nearest one counts.
    """
    width, size = taken.shape[-1], float(taken.abs().amax())
    parts: list[tuple[Source, Tensor]] = []
    for value in reversed(before):
        output = value.output.double()
        if output.numel() == taken.numel() and output.shape[-1] == width:
            parts.append((Source(value.when, range(width)), output.reshape(taken.shape)))
        elif output.shape[-1] == 2 * width and output.numel() == 2 * taken.numel():
            halves = (range(width), range(width, 2 * width), range(0, 2 * width, 2), range(1, 2 * width, 2))
            parts += [(Source(value.when, half), output[..., list(half)].reshape(taken.shape)) for half in halves]
    if not parts:
        return None
    starts = torch.stack([part.flatten()[:_FEW] for _, part in parts])
    few, bound = taken.flatten()[:_FEW], limit * size
    found: list[tuple[bool, bool, bool, float, int, int, str]] = []  # 0 of them multiplies where nothing does
    for name, function in ACTIVATIONS.items():
        made = function(starts)
        for number in _near(made, few, bound):
            error = float((function(parts[number][1]) - taken).abs().amax())
            found.append((name == "identity", False, False, error, number, 0, name))
        for number, other in (divmod(i, len(parts)) for i in _near((made[:, None] * starts).flatten(0, 1), few, bound)):
            if other != number:
                error = float((function(parts[number][1]) * parts[other][1] - taken).abs().amax())
                found.append((name == "identity", True, False, error, number, other, name))
        if name == "identity":
            continue
        for number, other in (divmod(i, len(parts)) for i in _near((made[:, None] * made).flatten(0, 1), few, bound)):
            if number < other:
                error = float((function(parts[number][1]) * function(parts[other][1]) - taken).abs().amax())
                found.append((False, True, True, error, number, other, name))
    fits = [f for f in found if f[3] <= bound]
    if not fits:
        return None
    # none at all, a gate, and an activation on both of its halves only where nothing else explains it
    _, is_gated, is_on_both, _, number, other, name = min(fits)
    return name, parts[number][0], parts[other][0] if is_gated else None, is_on_both


def _near(guesses: Tensor, few: Tensor, bound: float) -> list[int]:
    """Return which of `[N, F]` give the first numbers."""
    numbers: list[int] = ((guesses - few).abs().amax(-1) <= bound).nonzero().flatten().tolist()
    return numbers


def map_behind(products: dict[int, Product], seen: Traced, value: int) -> Product | None:
    """Return the product that gave a value, or the one before it to which a bias was added."""
    for when in range(value, max(value - 3, -1), -1):
        if when in products and products[when].output.numel() == seen.values[value].output.numel():
            return products[when]
    return None
