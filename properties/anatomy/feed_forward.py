"""The activations of a model: what stands between one linear map and the next, told by its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from veriformer.properties.anatomy.traced import Product, Traced, Value

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "mish": functional.mish,
    "identity": lambda x: x,
}
"""Activations by name, as functions of the numbers that a linear map gave."""

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


@dataclass(frozen=True)
class Source:
    """A part of what a linear map gave.

    Attributes:
        when: number of the value among the values.
        channels: of it.
    """

    when: int
    channels: range


def between_linear_maps(seen: Traced, limit: float) -> list[Between]:
    """Return every activation that is seen, in order.

    Args:
        seen: the trace of a forward.
        limit: largest relative difference that is rounding.
    """
    found = []
    products = {p.when: p for p in seen.products}
    for product in seen.products:
        if product.left.ndim > 2 and product.left.shape[:-2].numel() > 1:
            continue  # many products at once: no map of tokens by one matrix
        taken = product.left.double()
        before = [v for v in seen.values[: product.when] if _is_linear(v, taken)][-_BEHIND:]
        if told := _explained(taken, before, limit):
            name, source, other = told
            first = map_behind(products, seen, source.when)
            if first is not None:
                sizes = (taken.shape[-1], first.left.shape[-1], product.output.shape[-1])
                found.append(Between(product.place, name, other is not None, *sizes, product.when, source, other))
    return found


def _is_linear(value: Value, taken: Tensor) -> bool:
    is_map = value.name in ("mm", "addmm", "bmm", "matmul", "baddbmm", "add")
    return is_map and value.output.numel() in (taken.numel(), 2 * taken.numel())


def _explained(taken: Tensor, before: list[Value], limit: float) -> tuple[str, Source, Source | None] | None:
    """Return the activation that gives `taken`, what it was given, and what it is multiplied by."""
    size = float(taken.abs().amax())
    width = taken.shape[-1]
    parts: list[tuple[Source, Tensor]] = []
    for value in reversed(before):
        output = value.output.double()
        if output.numel() == taken.numel() and output.shape[-1] == width:
            parts.append((Source(value.when, range(width)), output.reshape(taken.shape)))
        elif output.shape[-1] == 2 * width and output.numel() == 2 * taken.numel():
            halves = (range(width), range(width, 2 * width), range(0, 2 * width, 2), range(1, 2 * width, 2))
            parts += [(Source(value.when, half), output[..., list(half)].reshape(taken.shape)) for half in halves]
    for source, part in parts:
        for name, function in ACTIVATIONS.items():
            if name != "identity" and float((function(part) - taken).abs().amax()) <= limit * size:
                return name, source, None
    for source, part in parts:
        for name, function in ACTIVATIONS.items():
            made = function(part)
            for other, factor in parts:
                if factor is part:
                    continue
                if float((made * factor - taken).abs().amax()) <= limit * size:
                    return name, source, other
    for source, part in parts:
        if float((part - taken).abs().amax()) <= limit * size:
            return "identity", source, None
    return None


def map_behind(products: dict[int, Product], seen: Traced, value: int) -> Product | None:
    """Return the product that gave a value, or the one before it to which a bias was added."""
    for when in range(value, max(value - 3, -1), -1):
        if when in products and products[when].output.numel() == seen.values[value].output.numel():
            return products[when]
    return None
