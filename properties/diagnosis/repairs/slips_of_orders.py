"""Slips of order: what is tiled, sorted, rolled, split, joined or counted the wrong way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.diagnosis.repairs.slips import (
    INTEGERS,
    Call,
    Slip,
    first_tensor,
    given,
    of_result,
    result_of,
)


def _repeated_each(call: Call) -> Any:
    """Undo a tiling of one axis that is to be repeated entry by entry."""
    x, sizes = first_tensor(call), call[1][1:]
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size) else sizes
    if x is None or len([n for n in sizes if n != 1]) != 1 or len(sizes) < x.ndim:
        return NotImplemented
    axis = next(i for i, n in enumerate(sizes) if n != 1)
    for _ in range(len(sizes) - x.ndim):
        x = x[None]
    return x.repeat_interleave(int(sizes[axis]), dim=axis)


def _tiled(call: Call) -> Any:
    x, times, axis = first_tensor(call), given(call, 1, "repeats"), given(call, 2, "dim")
    axis = 0 if axis is None and x is not None and x.ndim == 1 else axis
    if x is None or not isinstance(times, int) or axis is None:
        return NotImplemented
    return x.repeat(*(times if i == axis % x.ndim else 1 for i in range(x.ndim)))


def _permutation(index: Any) -> bool:
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype not in INTEGERS or len(index) < 2:
        return False
    return torch.equal(index.sort().values.cpu(), torch.arange(len(index)))


def _inverse_index(call: Call) -> Any:
    func, args, _ = call
    if func.__name__ == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(_permutation(i) for i in index):
            return NotImplemented
        return func(args[0], tuple(i.argsort() if _permutation(i) else i for i in index))
    index = given(call, 2, "index")
    if not _permutation(index):
        return NotImplemented
    return torch.index_select(args[0], given(call, 1, "dim"), index.argsort())


def _reversed_order(call: Call) -> Any:
    """Return several outputs in the other order, those of a split in two or more of one size."""
    made = result_of(call)
    if not isinstance(made, tuple | list) or not 2 <= len(made) <= 3:
        return NotImplemented
    return tuple(reversed(made)) if len({x.shape for x in made if isinstance(x, Tensor)}) == 1 else NotImplemented


def _reversed_parts(call: Call) -> Any:
    func, args, kwargs = call
    parts = args[0] if args else None
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        return NotImplemented
    return func(list(reversed(parts)), *args[1:], **kwargs)


def _rolled_back(call: Call) -> Any:
    x, shifts, dims = first_tensor(call), given(call, 1, "shifts"), given(call, 2, "dims")
    if x is None or shifts is None:
        return NotImplemented
    back = tuple(-s for s in shifts) if isinstance(shifts, tuple | list) else -shifts
    return torch.roll(x, back, dims) if dims is not None else torch.roll(x, back)


def _unflipped(call: Call) -> Any:
    return first_tensor(call).clone() if first_tensor(call) is not None else NotImplemented  # type: ignore[union-attr]


def _exclusive(call: Call) -> Any:
    x = first_tensor(call)
    made = result_of(call)
    return made - x if x is not None and made.shape == x.shape else NotImplemented


def _other_side(call: Call) -> Any:
    func, args, kwargs = call
    return func(*args, **{**kwargs, "right": not kwargs.get("right", False)}) if len(args) == 2 else NotImplemented


def _other_end(call: Call) -> Any:
    """Fill up at the other end of an axis."""
    func, args, kwargs = call
    sides = given(call, 1, "pad")
    if not isinstance(sides, tuple | list) or not args:
        return NotImplemented
    turned = [n for before, behind in zip(sides[::2], sides[1::2], strict=True) for n in (behind, before)]
    return func(args[0], turned, *args[2:], **{k: v for k, v in kwargs.items() if k != "pad"})


SLIPS = (
    Slip(("repeat", "tile"), "`repeat_interleave`, entry by entry, in place of a tiling", _repeated_each),
    Slip(("repeat_interleave",), "a tiling (`repeat`) in place of `repeat_interleave`", _tiled),
    Slip(("__getitem__", "index_select"), "the inverse of that permutation, its `argsort()`", _inverse_index),
    Slip(("chunk", "split", "unbind", "tensor_split"), "the parts in the other order", _reversed_order),
    Slip(("cat", "concat", "hstack", "stack"), "the parts joined in the other order", _reversed_parts),
    Slip(("roll",), "a roll the other way", _rolled_back),
    Slip(("pad",), "what is filled up at the other end", _other_end),
    Slip(("flip", "fliplr", "flipud"), "the order that was there before `flip`", _unflipped, leaves_out=True),
    Slip(("arange", "linspace"), "the numbers counted down instead of up", of_result(lambda x: x.flip(-1))),
    Slip(("cumsum",), "the sum of what stands before alone, without the entry itself", _exclusive),
    Slip(("searchsorted", "bucketize"), "`right` turned round: ties go to the other side", _other_side),
)
