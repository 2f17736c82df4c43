"""Slips of axes: exchanged before or behind a reshape, or the wrong one."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.diagnosis.repairs.slips import Call, Slip, Undo, first_tensor, given, result_of


def _shape_of(call: Call) -> tuple[int, ...] | None:
    x, rest = first_tensor(call), call[1][1:]
    shape = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list | torch.Size) else tuple(rest)
    if x is None or not all(isinstance(n, int) for n in shape):
        return None
    known = 1
    for n in shape:
        known *= n if n != -1 else 1
    return tuple(n if n != -1 else x.numel() // max(known, 1) for n in shape)


def _axes_before(one: int, other: int) -> Undo:
    """Exchange two axes before a reshape that joins or parts axes."""

    def undo(call: Call) -> Any:
        x, shape = first_tensor(call), _shape_of(call)
        if x is None or not shape or x.ndim <= max(one, other) or x.ndim == len(shape):
            return NotImplemented
        if 1 in (x.shape[one], x.shape[other]):
            return NotImplemented
        return x.transpose(one, other).reshape(shape)

    return undo


def _axes_behind(one: int, other: int) -> Undo:
    """Part axes in the other order, and exchange them."""

    def undo(call: Call) -> Any:
        x, shape = first_tensor(call), _shape_of(call)
        if x is None or not shape or len(shape) <= max(one, other) or x.ndim >= len(shape):
            return NotImplemented
        if 1 in (shape[one], shape[other]):
            return NotImplemented
        turned = list(shape)
        turned[one], turned[other] = turned[other], turned[one]
        return x.reshape(turned).transpose(one, other)

    return undo


def _over_axis(axis: int) -> Undo:
    def undo(call: Call) -> Any:
        func, x = call[0], first_tensor(call)
        own = given(call, 1, "dim")
        if x is None or not isinstance(own, int) or x.ndim < -axis or own % x.ndim == axis % x.ndim:
            return NotImplemented
        return func(x, dim=axis)

    return undo


def _untransposed(call: Call) -> Any:
    x, made = first_tensor(call), result_of(call)
    return x.clone() if x is not None and isinstance(made, Tensor) and made.shape == x.shape else NotImplemented


def _einsum(operand: int, one: int, other: int) -> Undo:
    """Exchange two letters of an operand of an einsum, or of its output (operand -1)."""

    def undo(call: Call) -> Any:
        func, args, kwargs = call
        if not args or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
            return NotImplemented
        inputs, output = args[0].replace(" ", "").split("->")
        terms = [*inputs.split(","), output]
        if operand >= len(terms) - 1:
            return NotImplemented
        letters = list(terms[operand])
        if len(letters) <= max(one, other):
            return NotImplemented
        letters[one], letters[other] = letters[other], letters[one]
        terms[operand] = "".join(letters)
        return func(f"{','.join(terms[:-1])}->{terms[-1]}", *args[1:], **kwargs)

    return undo


_PLACES = ("output", "first operand", "second operand", "third operand")
_PAIRS = tuple(combinations(range(5), 2))
_REDUCED = ("sum", "mean", "cumsum", "argmax", "norm", "amax", "amin", "softmax", "log_softmax")

SLIPS = (
    *(
        Slip(("reshape", "view", "flatten"), f"axes {a} and {b} exchanged before the reshape", _axes_before(a, b))
        for a, b in _PAIRS
    ),
    *(Slip(("reshape", "view"), f"axes {a} and {b} parted in the other order", _axes_behind(a, b)) for a, b in _PAIRS),
    *(
        Slip(("einsum",), f"axes {a} and {b} of the {_PLACES[n + 1]} exchanged", _einsum(n, a, b))
        for n in (-1, 0, 1, 2)
        for a, b in _PAIRS
    ),
    Slip(_REDUCED, "the last axis", _over_axis(-1)),
    Slip(_REDUCED, "the last axis but one", _over_axis(-2)),
    Slip(("transpose", "permute", "swapaxes", "__get__"), "the tensor as it was, not transposed", _untransposed),
)
