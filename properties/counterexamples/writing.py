"""From a call that torch reports to the source of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from veriformer.properties.counterexamples.program import UnwritableError

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "floordiv": "//", "mod": "%", "matmul": "@",
    "pow": "**", "and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=",
}  # fmt: skip
_UNARY = {"neg": "-", "invert": "~"}
_CHANGING = ("add", "sub", "mul", "truediv", "div", "pow", "and", "or")
"""Operators that have a form of their own which changes what stands on the left."""

_NUMBERS = {"__float__": "float", "__int__": "int", "__bool__": "bool"}
_MODULES = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.autograd": torch.autograd,
}
Express = Callable[[Any], str]


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], express: Express) -> str:
    """Return one expression, or one statement where the call changes what it is given.

    Args:
        func: what a `TorchFunctionMode` is told that was called.
        args: of it.
        kwargs: of it.
        express: gives the source of an argument.

    Raises:
        UnwritableError: the function is known under no public name, or an argument has no source.
    """
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = f"{express(args[0])}.{func.__self__.__name__}"
        return attribute if name == "__get__" else f"{attribute} = {express(args[1])}"
    if name in ("__getitem__", "__setitem__"):
        place = f"{express(args[0])}[{_index(args[1], express)}]"
        return place if name == "__getitem__" else f"{place} = {express(args[2])}"
    shown = [express(a) for a in args]
    operation = _operation(name, shown)
    if operation is not None:
        return operation
    given = shown + [f"{k}={express(v)}" for k, v in kwargs.items() if not _is_default(func, k, v)]
    public = _public_names().get(func)
    if public is not None:
        return f"{public}({', '.join(given)})"
    if given and hasattr(torch.Tensor, name):  # operators come as wrappers of the method of this name
        return f"{given[0]}.{name}({', '.join(given[1:])})"
    raise UnwritableError(f"the function {name or func!r}")


def _operation(name: str, shown: list[str]) -> str | None:
    """Return the call as an operator, if it is one."""
    if not name.startswith("__"):
        return None
    bare = name.strip("_")
    if name in _NUMBERS:
        return f"{_NUMBERS[name]}({shown[0]})"
    if bare in _UNARY:
        return f"({_UNARY[bare]}{shown[0]})"
    if len(shown) == 2 and bare in _BINARY:
        return _between(shown[0], _BINARY[bare], shown[1])
    if len(shown) == 2 and bare.removeprefix("r") in _BINARY:
        return _between(shown[1], _BINARY[bare.removeprefix("r")], shown[0])
    return None


def _between(left: str, sign: str, right: str) -> str:
    """Return an operation; a power binds more tightly than the sign of what is raised to it."""
    return f"({f'({left})' if sign == '**' and left.startswith('-') else left} {sign} {right})"


def _index(index: Any, express: Express) -> str:
    if isinstance(index, tuple):
        return ", ".join(_index(i, express) for i in index) + ("," if len(index) == 1 else "") or "()"
    if isinstance(index, slice):
        ends = ["" if end is None else express(end) for end in (index.start, index.stop, index.step)]
        return ":".join(ends[:2] if index.step is None else ends)
    return express(index)


@functools.cache
def _public_names() -> dict[Any, str]:
    """Return the functions of torch that take tensors, each with the name to call it by."""
    found: dict[Any, str] = {}
    for prefix, module in reversed(_MODULES.items()):
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("__") and not inspect.isclass(value):
                found[value] = f"{prefix}.{name}"
    return found


def _is_default(func: Any, keyword: str, value: Any) -> bool:
    """Whether a keyword of a function that always passes all of them on can be left out."""
    if func is not torch.autograd.grad:
        return False
    parameter = inspect.signature(func).parameters.get(keyword)
    return parameter is not None and value is parameter.default  # None, False or True, all of them


def is_in_place(name: str) -> bool:
    """Whether a function changes what it is given, by its name."""
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name[2:3] == "i" and name[3:-2] in _CHANGING)
    return name.endswith("_")


def leaves_of(value: Any) -> Iterator[Any]:
    """Go through what lies in lists, tuples and dicts."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value
