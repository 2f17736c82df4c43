"""The activations of a model: what stands between one linear map and the next, told by its values.

Where no known one is found, any function of one number is: its curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_SOME = [name for name in ACTIVATIONS if name != "identity"]

_FEW = 8  # numbers that are compared first: most guesses are wrong in each
TINY = 0.03
"""Numbers that are all below it say nothing of an activation: near 0 all of them are constants, or multiples."""

_BEHIND = 12  # linear maps before it that a product's operand may come from


_NEAREST = 4
_MOST_TURNS = 6.0
"""Ranges that a curve goes up and down in all: numbers that have nothing to do with one another go hundreds."""
_ENOUGH = 64  # numbers that a curve is told from
_SHOWN = (-2.0, -1.0, 1.0, 2.0)


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
        odd: how the activation stands where no textbook has it, in words; "" where it stands as usual.
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
    odd: str = ""


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
            name, source, other, odd = told
            first = map_behind(products, seen, source.when)
            if first is not None:
                sizes = (taken.shape[-1], first.left.shape[-1], product.output.shape[-1])
                is_gated = other is not None
                found.append(Between(product.place, name, is_gated, *sizes, product.when, source, other, odd))
    return found


def _is_linear(value: Value, taken: Tensor) -> bool:
    return value.name in LINEAR and value.output.numel() in (taken.numel(), 2 * taken.numel())


def _explained(taken: Tensor, before: list[Value], limit: float) -> tuple[str, Source, Source | None, str] | None:
    """Return the activation that explains `taken` best, what it was given, what goes with it, and what is odd about it.

    Float32 does not tell the two forms of GELU apart by the limit alone: the nearest one counts.
    """
    width, bound = taken.shape[-1], limit * float(taken.abs().amax())
    parts: list[tuple[Source, Tensor]] = []
    for value in reversed(before):
        output = value.output.double()
        if float(output.abs().amax()) < TINY:
            continue
        if output.numel() == taken.numel() and output.shape[-1] == width:
            parts.append((Source(value.when, range(width)), output.reshape(taken.shape)))
        elif output.shape[-1] == 2 * width and output.numel() == 2 * taken.numel():
            halves = (range(width), range(width, 2 * width), range(0, 2 * width, 2), range(1, 2 * width, 2))
            parts += [(Source(value.when, half), output[..., list(half)].reshape(taken.shape)) for half in halves]
    if not parts:
        return None
    starts = torch.stack([part.flatten()[:_FEW] for _, part in parts])
    few = taken.flatten()[:_FEW]
    # an odd form only where no usual one explains it, and none at all where nothing else does
    for forms, names in ((_USUAL, _SOME), (_ODD, _SOME), (_USUAL, ("identity",))):
        fits = []
        for order, form in enumerate(forms.values()):
            for place, row in _near(_made(form, names, starts), few, bound):
                for number, other in _numbers(form, row, len(starts)):
                    whole = form(ACTIVATIONS[names[place]], parts[number][1], parts[other][1])
                    error = float((whole - taken).abs().amax())
                    if error <= bound:
                        fits.append((order, error, number, other, names[place]))
        if fits:
            order, _, number, other, name = min(fits)  # a gate only where no one map explains it: 0 multiplies nothing
            words, form = list(forms.items())[order]
            odd = words if words in _ODD else ""
            return name, parts[number][0], None if form in _ALONE else parts[other][0], odd
    return _scaled(taken, parts, starts, bound)


def _scaled(
    taken: Tensor, parts: list[tuple[Source, Tensor]], starts: Tensor, bound: float
) -> tuple[str, Source, Source | None, str] | None:
    """Return the activation that explains `taken` but for a factor, as `_explained` does."""
    few = taken.flatten()[:_FEW]
    for form in _USUAL.values():
        made = _made(form, _SOME, starts)
        factors = (made * few).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True).clamp(min=1e-30)
        for place, row in _near(factors * made, few, bound):
            name = _SOME[place]
            for number, other in _numbers(form, row, len(starts)):
                whole = form(ACTIVATIONS[name], parts[number][1], parts[other][1])
                factor = float((whole * taken).sum() / whole.square().sum())
                if factor and float((factor * whole - taken).abs().amax()) <= bound:
                    return name, parts[number][0], None if form in _ALONE else parts[other][0], f"times {factor:.4g}"
    return None


def _alone(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(x)


def _gated(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(x) * y


def _twice(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(f(x))


def _on_both(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(x) * f(y)


def _on_product(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(x * y)


def _added(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(x) + y


_ALONE = (_alone, _twice)
"""Ways in which an activation acts on the output of one linear map; the others act on two."""

_USUAL = {"alone": _alone, "gated": _gated}
_ODD = {
    "twice": _twice,
    "on both halves of the gate": _on_both,
    "on the product of the gate and what it gates": _on_product,
    "added to the other half, which it is to multiply": _added,
}


def _made(form: Callable[..., Tensor], names: Sequence[str], starts: Tensor) -> Tensor:
    """Return what a form makes of the first numbers of each part, or each pair, by every function: `[A, N, F]`."""
    if form in _ALONE:
        return torch.stack([form(ACTIVATIONS[name], starts, starts) for name in names])
    return torch.stack([form(ACTIVATIONS[name], starts[:, None], starts).flatten(0, 1) for name in names])


def _numbers(form: Callable[..., Tensor], row: int, parts: int) -> list[tuple[int, int]]:
    """Return which parts are behind a row of what was made: one with itself, or two."""
    if form in _ALONE:
        return [(row, row)]
    return [pair] if (pair := divmod(row, parts))[0] != pair[1] else []


def _near(guesses: Tensor, few: Tensor, bound: float) -> list[tuple[int, int]]:
    """Return the function and the row of those of `[A, N, F]` that give the first numbers."""
    numbers: list[tuple[int, int]] = ((guesses - few).abs().amax(-1) <= bound).nonzero().tolist()
    return numbers


def map_behind(products: dict[int, Product], seen: Traced, value: int) -> Product | None:
    """Return the product that gave a value, or the one before it to which a bias was added."""
    for when in range(value, max(value - 3, -1), -1):
        if when in products and products[when].output.numel() == seen.values[value].output.numel():
            return products[when]
    return None


@dataclass
class Curve:
    """What stands between the maps of one feed-forward network.

    Attributes:
        place: of the module that computes the second.
        given: `[N]`, what the first map gave, in rising order.
        made: `[N]`, what the second takes.
    """

    place: str
    given: Tensor
    made: Tensor

    def apart(self, name: str) -> float:
        """Return how far it is from an activation of `ACTIVATIONS`, relative to its size."""
        return float((ACTIVATIONS[name](self.given) - self.made).abs().amax() / self.made.abs().amax())

    def told(self) -> str:
        """Say which function it is: one of a known form with other numbers, or what it gives in some places."""
        return _of_tanh(self.given, self.made) or _of_sigmoid(self.given, self.made) or self._values()

    def _values(self) -> str:
        low, high = float(self.given[0]), float(self.given[-1])
        at = [x for x in _SHOWN if low <= x <= high] or [low, high]
        near = [int((self.given - x).abs().argmin()) for x in at]
        return "a function of " + ", ".join(f"{float(self.made[i]):.4g} at {float(self.given[i]):.3g}" for i in near)


def curves(seen: Traced, width: int, inner: int) -> list[Curve]:
    """Return the functions of one number that stand between maps from the model's width to d_ff and back."""
    found, products = [], {p.when: p for p in seen.products}
    for product in seen.products:
        if product.left.shape[-1] != inner or product.output.shape[-1] != width:
            continue
        if product.left.ndim > 2 and product.left.shape[:-2].numel() > 1:
            continue
        taken = product.left.cpu().double().flatten()
        before = [v for v in seen.values[: product.when] if v.name in LINEAR and v.output.numel() == len(taken)]
        for value in reversed(before[-_NEAREST:]):
            first = map_behind(products, seen, value.when)
            if first is None or first.left.shape[-1] != width or value.output.shape[-1] != inner:
                continue
            given, order = value.output.double().flatten().sort()
            if is_curve(given, taken[order]):
                found.append(Curve(product.place, given, taken[order]))
                break
    return found


def is_curve(given: Tensor, made: Tensor) -> bool:
    """Return whether numbers are a function of others, in whose rising order they stand."""
    span = float(made.max() - made.min())
    return len(given) >= _ENOUGH and span > 0 and float(made.diff().abs().sum()) <= _MOST_TURNS * span


def _of_tanh(x: Tensor, y: Tensor) -> str | None:
    """Fit x / 2 (1 + tanh(a x + b x^3)), which GELU is with a = sqrt(2 / pi) and b = 0.044715 a."""
    inside = 2 * y / x - 1
    usable = (x.abs() > 0.05) & (inside.abs() < 0.999)
    if int(usable.sum()) < _ENOUGH // 2:
        return None
    x, y, inside = x[usable], y[usable], inside[usable]
    weights = torch.linalg.lstsq(torch.stack([x, x**3], 1), torch.atanh(inside)[:, None]).solution.flatten()
    made = x / 2 * (1 + torch.tanh(weights[0] * x + weights[1] * x**3))
    if float((made - y).abs().amax()) > 1e-4 * float(y.abs().amax()):
        return None
    a, b = float(weights[0]), float(weights[1])
    return (
        f"x / 2 (1 + tanh({a:.4g} (x + {b / a:.4g} x^3))), where the tanh form of GELU has sqrt(2 / pi) = 0.7979 and "
        "0.04472"
    )


def _of_sigmoid(x: Tensor, y: Tensor) -> str | None:
    """Fit x sigmoid(a x): SiLU with a = 1, the quick form of GELU with a = 1.702."""
    share = y / x
    usable = (x.abs() > 0.05) & (share > 1e-3) & (share < 1 - 1e-3)
    if int(usable.sum()) < _ENOUGH // 2:
        return None
    x, y, share = x[usable], y[usable], share[usable]
    slope = (torch.logit(share) * x).sum() / x.square().sum()
    if float((x * torch.sigmoid(slope * x) - y).abs().amax()) > 1e-4 * float(y.abs().amax()):
        return None
    return f"x sigmoid({float(slope):.4g} x), where SiLU has 1 and the quick form of GELU 1.702"
