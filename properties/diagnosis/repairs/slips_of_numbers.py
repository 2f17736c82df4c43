"""Slips of numbers: signs, factors, extremes, divisors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.diagnosis.repairs.slips import INTEGERS, Call, Slip, Undo, of_result


def _exchanged(call: Call) -> Any:
    _, args, kwargs = call
    a, b = (*args, None, None)[:2]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or kwargs:
        return NotImplemented
    return b - a


def _other_extreme(call: Call) -> Any:
    func, args, kwargs = call
    names = {"maximum": "minimum", "amax": "amin", "max": "min"}
    other = {**names, **{v: k for k, v in names.items()}}[func.__name__]
    return getattr(torch, other)(*args, **kwargs)


def _other_wave(call: Call) -> Any:
    return (torch.cos if call[0].__name__ == "sin" else torch.sin)(call[1][0])


def _other_variance(call: Call) -> Any:
    func, args, kwargs = call
    unbiased = kwargs.get("unbiased", kwargs.get("correction", 1) != 0)
    rest = {k: v for k, v in kwargs.items() if k not in ("unbiased", "correction")}
    return func(*args, **rest, correction=0 if unbiased else 1) if len(args) <= 2 else NotImplemented


def _inverse_factor(call: Call) -> Any:
    func, args, _ = call
    if (
        len(args) != 2
        or not isinstance(args[0], Tensor)
        or not isinstance(args[1], int | float)
        or args[1] in (0, 1, -1)
    ):
        return NotImplemented
    return args[0] / args[1] if func.__name__ in ("mul", "__mul__", "__rmul__") else args[0] * args[1]


def _left_out(call: Call) -> Any:
    args = call[1]
    if len(args) != 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], int | float) or args[1] in (0, 1):
        return NotImplemented
    return args[0].clone()


def _one_summand(place: int) -> Undo:
    def undo(call: Call) -> Any:
        a, b = (*call[1], None, None)[:2]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or not a.is_floating_point():
            return NotImplemented
        return (a, b)[place].clone()

    return undo


def _rest_for_quotient(call: Call) -> Any:
    x, n = (*call[1], None, None)[:2]
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or not isinstance(n, int) or n < 1:
        return NotImplemented
    return x % n if "div" in call[0].__name__ else torch.div(x, n, rounding_mode="floor")


def _other_divisor(call: Call) -> Any:
    """Count by the other of two factors of a whole: x // n where x // (size / n) is meant."""
    func, args, _ = call
    x, n = (*args, None, None)[:2]
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or not isinstance(n, int) or n < 1 or not x.numel():
        return NotImplemented
    other, left = divmod(int(x.max()) + 1, n)
    return NotImplemented if left or other == n or other < 1 else func(x, other)


def _of_the_other_factor(call: Call) -> Any:
    """Return the quotient by the other of two factors of a whole in place of the rest by the one, and back."""
    func, args, _ = call
    x, n = (*args, None, None)[:2]
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or not isinstance(n, int) or n < 1 or not x.numel():
        return NotImplemented
    other, left = divmod(int(x.max()) + 1, n)
    if left or other < 1:
        return NotImplemented
    return x % other if "div" in func.__name__ else torch.div(x, other, rounding_mode="floor")


_FACTORS = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide")
_QUOTIENTS = ("floor_divide", "__floordiv__", "remainder", "__mod__")
_COUNTED = (
    "arange", "sum", "cumsum", "add", "__add__", "__radd__", "sub", "__sub__", "argmax", "clamp", "floor_divide",
    "__floordiv__",
)  # fmt: skip

SLIPS = (
    Slip(("sub", "__sub__", "__rsub__"), "the difference the other way round", _exchanged),
    Slip(("neg", "__neg__"), "the sign as it was", of_result(torch.neg)),
    Slip(("maximum", "minimum", "amax", "amin", "max", "min"), "maximum and minimum exchanged", _other_extreme),
    Slip(("sin", "cos"), "sine and cosine exchanged", _other_wave),
    Slip(("var", "std"), "the other divisor (n or n - 1)", _other_variance),
    Slip(("add", "__add__", "__radd__"), "the second summand left out", _one_summand(0), leaves_out=True),
    Slip(("add", "__add__", "__radd__"), "the first summand left out", _one_summand(1), leaves_out=True),
    Slip(_FACTORS, "the inverse factor", _inverse_factor),
    Slip(_FACTORS, "that factor left out", _left_out, leaves_out=True),
    Slip((*_QUOTIENTS, "div"), "quotient and remainder exchanged", _rest_for_quotient),
    Slip(_QUOTIENTS, "the other factor of the whole as divisor", _other_divisor),
    Slip(_QUOTIENTS, "quotient and remainder exchanged, by the other factor of the whole", _of_the_other_factor),
    Slip(_COUNTED, "one less", of_result(lambda x: x - 1, dtypes=INTEGERS)),
    Slip(_COUNTED, "one more", of_result(lambda x: x + 1, dtypes=INTEGERS)),
    Slip(("detach",), "no `detach`", lambda call: call[1][0], leaves_out=True),
    Slip(("dropout",), "no dropout", lambda call: call[1][0] if call[1] else NotImplemented, leaves_out=True),
)
