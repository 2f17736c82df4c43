"""What is wrong with one backward written by hand, called by itself: a term, a factor, an activation's derivative."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor

from veriformer.properties.diagnosis.derivatives.differentiating import Setting, factor_in_words
from veriformer.properties.diagnosis.derivatives.gradient_formulas import told_by_formula
from veriformer.properties.diagnosis.derivatives.gradient_points import ACTIVATIONS, told_by_point
from veriformer.properties.diagnosis.derivatives.own_backwards import Applied
from veriformer.properties.engine.case import Case

_PARTNERS = ("the queries", "the keys", "the values")


def told_of_function(
    case: Case, made: Setting, applied: Applied, wrong: list[int], other: Applied | None
) -> dict[str, list[str]]:
    """Return what is wrong in words, and the arguments of the function's forward that it is said of.

    Args:
        case: of the failure.
        made: how the subject is called.
        applied: the function.
        wrong: places of the arguments whose gradient is wrong.
        other: the same function in a call of other sizes.
    """
    names = argument_names(applied)
    alone = _alone(made, applied)
    if alone is None:
        return {}
    told: dict[str, list[str]] = {}
    for place in wrong:
        words = _words(case, made, applied, alone, place, other)
        if words:
            told.setdefault(words, []).append(names[place])
    if len(told) < 2 and set().union(*told.values()) != {names[place] for place in wrong}:
        words = told_by_point(applied, wrong, names)
        return {words: [names[place] for place in wrong]} if words else told
    return told


def argument_names(applied: Applied) -> dict[int, str]:
    """Return the names that the function's forward gives its arguments."""
    taken = list(inspect.signature(applied.made.forward).parameters.values())
    named = [p.name for p in taken if p.kind is not p.VAR_POSITIONAL]
    found = named if len(named) < len(taken) else named[-len(applied.args) :]
    if len(named) < len(taken) and applied.made.setup_context is torch.autograd.Function.setup_context:
        found = named[1:]  # the first is the context
    return {place: found[place] if place < len(found) else f"argument {place}" for place in range(len(applied.args))}


def _alone(made: Setting, applied: Applied) -> Setting | None:
    leaves, args = {}, list(applied.args)
    for place, x in enumerate(args):
        if isinstance(x, Tensor):
            args[place] = x.detach().clone()
            if x.is_floating_point():
                leaves[str(place)] = args[place].requires_grad_(x.requires_grad)
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}

    def run() -> Tensor:
        given = applied.made.apply(*args)
        output = given[0] if isinstance(given, tuple) else given
        assert isinstance(output, Tensor)
        return output

    return Setting(made.built, run, leaves, len(leaves), _numbers(applied)) if leaves else None


def _numbers(applied: Applied) -> dict[str, float]:
    """Return the sizes of the first argument that a factor may be made of."""
    x = next((x for x in applied.args if isinstance(x, Tensor) and x.is_floating_point()), None)
    if x is None or x.ndim < 2:
        return {}
    found = {"the number of samples": float(x.shape[0]), "the last axis": float(x.shape[-1])}
    if _is_attention(applied):
        return {"d_head": float(x.shape[-1]), "the number of keys": float(applied.args[1].shape[-2]),
                "the number of heads": float(x.shape[1])}  # fmt: skip
    return {**found, "the number of rows": float(x[..., 0].numel())}


def _is_attention(applied: Applied) -> bool:
    three = applied.args[:3]
    if len(three) < 3 or not all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 4 for x in three):
        return False
    q, k, v = three
    return bool(q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2] and q.shape[1] % k.shape[1] == 0)


def _words(
    case: Case, made: Setting, applied: Applied, alone: Setting, place: int, other: Applied | None
) -> str | None:
    gradients = alone.gradients()
    gradient = gradients[str(place)]
    if gradient is None or not gradient.any():
        return "there is none, though the output depends on it"
    told = _as_attention(case, alone, applied, place, gradient) if _is_attention(applied) else None
    if told is None:
        told = _as_activation(alone, str(place), gradient)
    if told is not None:
        return told
    first = next(iter(alone.leaves))
    if str(place) == first:
        renamed = _renamed(alone, {first: "the input"})
        for kind in ("norm", "softmax"):
            if told := told_by_formula(case, renamed, "the input", gradient, kind):
                return told
    return _factor(made, applied, alone, place, other)


def _renamed(alone: Setting, names: dict[str, str]) -> Setting:
    leaves = {names.get(name, name): x for name, x in alone.leaves.items()}
    return Setting(alone.built, alone.run, leaves, alone.inputs, alone.numbers, alone.allow, _weight=alone._weight)


def _as_attention(case: Case, alone: Setting, applied: Applied, place: int, gradient: Tensor) -> str | None:
    if place > 2:
        return None
    made = _renamed(alone, dict(zip(("0", "1", "2"), _PARTNERS, strict=True)))
    queries, keys = applied.args[0].shape[-2], applied.args[1].shape[-2]
    masks = [x for x in applied.args if isinstance(x, Tensor) and x.dtype == torch.bool]
    past = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=gradient.device).tril(keys - queries)
    for allow in (None, *masks, past, *(m & past for m in masks if m.shape[-2:] in ((queries, keys), (1, keys)))):
        made.allow = allow
        try:
            told = told_by_formula(case, made, _PARTNERS[place], gradient, "attention")
        except RuntimeError:  # the shape of the mask is another
            continue
        if told:
            return told
    return None


def _factor(made: Setting, applied: Applied, alone: Setting, place: int, other: Applied | None) -> str | None:
    here = alone.ratio(str(place))
    beside = None if other is None else _alone(made, other)
    if here is None or abs(here - 1) < 1e-3:  # it differs otherwise than by a factor
        return None
    there = beside.ratio(str(place)) if beside is not None and str(place) in beside.leaves else None
    if beside is None or there is None:
        return f"it is {here:.4g} times the derivative"
    return factor_told((here, alone.numbers), (there, beside.numbers), _is_attention(applied))


def factor_told(
    first: tuple[float, dict[str, float]], second: tuple[float, dict[str, float]], is_attention: bool
) -> str:
    """Say by which factor a gradient differs from the derivative, as measured at two sizes."""
    here, there = first[0], second[0]
    if abs(here - there) <= 1e-4 * abs(here):
        return "it has the wrong sign" if abs(here + 1) < 1e-4 else f"it is {here:.4g} times the derivative"
    form = factor_in_words(first, second)
    if form is None:
        return f"it is a multiple of the derivative that depends on the sizes ({here:.4g} and {there:.4g} times it)"
    missing = {"sqrt(d_head)": "the scale 1 / sqrt(d_head) is missing", "1 / sqrt(d_head)": "the scale is there twice"}
    meant = f"{missing[form]}: " if is_attention and form in missing else ""
    return f"{meant}it is {form} times the derivative ({here:.4g} and {there:.4g} times it at two sizes)"


def _as_activation(alone: Setting, place: str, gradient: Tensor) -> str | None:
    """Tell the wrong derivative of an activation: of one input, of a sum of two, or of one beside a gate."""
    inputs, y = [x.detach() for x in alone.leaves.values()], alone.output()
    g, at = alone.weight(y), list(alone.leaves).index(place)
    if len(inputs) == 1 and inputs[0].ndim and inputs[0].shape[-1] == 2 * y.shape[-1]:
        one, two = inputs[0].chunk(2, -1)
        halves = gradient.chunk(2, -1)
        found = [_as_gate(a, b, y, g, n, halves) for n, (a, b) in enumerate(((one, two), (two, one)))]
        return next((words for words in found if words), None)
    if len(inputs) == 2 and inputs[0].shape == inputs[1].shape == y.shape:
        gradients = tuple(gradient if n == at else None for n in range(2))
        for n, (a, b) in enumerate((inputs, inputs[::-1])):
            if told := _as_gate(a, b, y, g, n, gradients):
                return told
    if len(inputs) > 2 or any(x.ndim > y.ndim for x in inputs):
        return None
    x = sum(inputs, torch.zeros_like(y))
    name = _activation_of(x, y)
    if x.shape != y.shape or name is None:
        return None
    for words, slope in _slopes(name, x, y):
        if torch.allclose((g * slope).sum_to_size(gradient.shape), gradient, rtol=1e-7, atol=1e-10):
            return f"it is not the derivative of {name}: {words}"
    return f"it is not the derivative of {name}"


def _activation_of(x: Tensor, y: Tensor) -> str | None:
    if x.shape != y.shape:
        return None
    return next((n for n, f in ACTIVATIONS.items() if torch.allclose(f(x), y, rtol=1e-9, atol=1e-12)), None)


def _as_gate(
    x: Tensor, gate: Tensor, y: Tensor, g: Tensor, first: int, gradients: tuple[Tensor | None, ...]
) -> str | None:
    """Tell what is wrong where an output is act(x) times a gate; `first`: which gradient is that of x."""
    name = next((n for n, f in ACTIVATIONS.items() if torch.allclose(f(x) * gate, y, rtol=1e-9, atol=1e-12)), None)
    if name is None:
        return None
    value, of_x, of_gate = ACTIVATIONS[name](x), gradients[first], gradients[1 - first]
    right = _slope(name, x)

    def gives(one: Tensor | None, two: Tensor) -> bool:
        return one is not None and torch.allclose(one, two, rtol=1e-7, atol=1e-10)

    for words, slope in _slopes(name, x, value):
        if gives(of_x, g * gate * slope):
            return f"of the input of {name}: {words}"
    if gives(of_x, g * right):
        return f"of the input of {name}: it is not multiplied by the other factor"
    if gives(of_x, g * y * right):
        return f"of the input of {name}: it is multiplied by the output, not by the other factor"
    for words, other in (
        (f"it is multiplied by the input of {name}, not by its value", x),
        (f"it is multiplied by the derivative of {name}, not by its value", right),
        ("it is multiplied by the output", y),
        ("it is passed through as it is", torch.ones_like(y)),
        ("it is multiplied by that factor itself", gate),
    ):
        if gives(of_gate, g * other):
            return f"of the factor beside {name}: {words}"
    return None


def _slope(name: str, x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(ACTIVATIONS[name](leaf).sum(), leaf)[0]


def _slopes(name: str, x: Tensor, y: Tensor) -> Iterator[tuple[str, Tensor]]:
    right, near = _slope(name, x), torch.sigmoid(x)
    bell = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
    whole = 0.5 * (1 + torch.erf(x / 2**0.5))
    yield "the gradient is passed through as it is", torch.ones_like(x)
    yield "it is taken at the output instead of the input", _slope(name, y)
    yield "the incoming gradient is multiplied by the output", y
    if name == "SiLU":
        yield "the term x * sigmoid(x) * (1 - sigmoid(x)) is missing", near
        yield "the term sigmoid(x) is missing", right - near
        yield "x is missing in the second term", near + near * (1 - near)
    if name.startswith("GELU"):
        yield "the term x * phi(x), with the normal density phi, is missing", whole
        yield "the term Phi(x), the normal distribution function, is missing", x * bell
    if name == "GELU (tanh)":
        yield from _slopes_of_tanh_gelu(x)
    if name == "sigmoid":
        yield "the factor 1 - sigmoid(x) is missing", y
        yield "the factor sigmoid(x) is missing", 1 - y
    if name == "tanh":
        yield "tanh(x) is not squared in 1 - tanh(x)^2", 1 - y
        yield "x stands for tanh(x) in 1 - tanh(x)^2", 1 - x.square()
    if name == "squared ReLU":
        yield "the factor 2 is missing", right / 2
    for other in ACTIVATIONS:
        if other != name:
            yield f"it is that of {other}", _slope(other, x)


def _slopes_of_tanh_gelu(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong derivatives of 0.5 x (1 + tanh(c (x + a x^3)))."""
    a, c = 0.044715, (2 / torch.pi) ** 0.5
    tanh = torch.tanh(c * (x + a * x**3))
    whole, bell, inner = 0.5 * (1 + tanh), 1 - tanh.square(), c * (1 + 3 * a * x.square())
    yield "the factor 3 of the derivative of a x^3 is missing", whole + 0.5 * x * bell * c * (1 + a * x.square())
    yield "the derivative of a x^3 is left out", whole + 0.5 * x * bell * c
    yield "the derivative of what stands in the tanh is left out", whole + 0.5 * x * bell
    yield "tanh is not squared in 1 - tanh^2", whole + 0.5 * x * (1 - tanh) * inner
    yield "x is missing in the second term", whole + 0.5 * bell * inner
    yield "the factor 0.5 of the second term is missing", whole + x * bell * inner
    yield "the factor sqrt(2 / pi) is missing in the second term", whole + 0.5 * x * bell * inner / c
    yield "the second term, 0.5 x (1 - tanh^2) times the derivative inside, is missing", whole
    yield "the first term, 0.5 (1 + tanh), is missing", 0.5 * x * bell * inner
