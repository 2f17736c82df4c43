"""Slips of one call, each with what undoes it: another axis, an offset by one, an order, a sign, a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Undo = Callable[[Call], Any]

INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Slip:
    """One slip that a call may be.

    Attributes:
        names: of the functions that it may be one of.
        told: what holds where it is undone, behind "with".
        undo: makes what the call should have given; NotImplemented where this call can be no such slip.
        leaves_out: whether it is the call, or a part of it, that is one too many.
    """

    names: tuple[str, ...]
    told: str
    undo: Undo
    leaves_out: bool = False


def first_tensor(call: Call) -> Tensor | None:
    """Return the first argument of a call, where it is a tensor."""
    args = call[1]
    return args[0] if args and isinstance(args[0], Tensor) else None


def given(call: Call, place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call by its place or its name."""
    _, args, kwargs = call
    return args[place] if len(args) > place else kwargs.get(name, default)


def result_of(call: Call) -> Any:
    """Return what a call gives as it is."""
    func, args, kwargs = call
    return func(*args, **kwargs)


def of_result(change: Callable[[Tensor], Any], *, dtypes: tuple[torch.dtype, ...] | None = None) -> Undo:
    """Return what changes the result of a call, where it is a tensor of one of some dtypes."""

    def undo(call: Call) -> Any:
        made = result_of(call)
        if not isinstance(made, Tensor) or (dtypes and made.dtype not in dtypes):
            return NotImplemented
        return change(made)

    return undo
