"""Slips of pieces: slices, places and rows of a table that are off by one, or at the other end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from veriformer.properties.diagnosis.repairs.slips import INTEGERS, Call, Slip, Undo


def _moved_slice(change: Callable[[int, int, int], tuple[int, int] | None]) -> Undo:
    """Change where the one slice of an index begins and ends, of an axis of so many places; its length remains."""

    def undo(call: Call) -> Any:
        func, (x, index), _ = call[0], call[1][:2], call[2]
        index = index if isinstance(index, tuple) else (index,)
        if not isinstance(x, Tensor) or any(isinstance(i, Tensor | list) for i in index):
            return NotImplemented
        parts = [i for i in index if i is not None]
        if Ellipsis in parts:
            behind = parts[parts.index(Ellipsis) + 1 :]
            axes = [*range(parts.index(Ellipsis)), None, *range(x.ndim - len(behind), x.ndim)]
        else:
            axes = [*range(len(parts))]
        cut = [
            (n, axis, part)
            for n, (axis, part) in enumerate(zip(axes, parts, strict=True))
            if axis is not None and isinstance(part, slice) and part.step in (None, 1) and part != slice(None)
        ]
        if len(cut) != 1:
            return NotImplemented
        number, axis, part = cut[0]
        size = x.shape[axis]
        start, stop, _ = part.indices(size)
        if (moved := change(start, stop, size)) is None:
            return NotImplemented
        parts[number] = slice(*moved)
        own = iter(parts)
        return func(x, tuple(None if i is None else next(own) for i in index))

    return undo


def _mirrored(start: int, stop: int, size: int) -> tuple[int, int] | None:
    mirrored = size - stop, size - start
    return mirrored if mirrored != (start, stop) and stop > start else None


def _shifted(step: int) -> Callable[[int, int, int], tuple[int, int] | None]:
    def change(start: int, stop: int, size: int) -> tuple[int, int] | None:
        moved = start + step, stop + step
        return moved if 0 <= moved[0] < moved[1] <= size else None

    return change


def _other_place(step: int) -> Undo:
    """Take the neighbour of the one place that an index picks."""

    def undo(call: Call) -> Any:
        func, (x, index) = call[0], call[1][:2]
        index = index if isinstance(index, tuple) else (index,)
        places = [n for n, i in enumerate(index) if isinstance(i, int) and not isinstance(i, bool)]
        if not isinstance(x, Tensor) or len(places) != 1 or any(isinstance(i, Tensor | list) for i in index):
            return NotImplemented
        moved = list(index)
        moved[places[0]] += step
        try:
            return func(x, tuple(moved))
        except IndexError:
            return NotImplemented

    return undo


def _looked_up(change: Callable[[Tensor, int], Tensor]) -> Undo:
    """Look up other rows of a table."""

    def undo(call: Call) -> Any:
        func, args, kwargs = call
        at, table = args[:2]
        if not isinstance(at, Tensor) or not isinstance(table, Tensor) or at.dtype not in INTEGERS:
            return NotImplemented
        return func(change(at, len(table)).clamp(0, len(table) - 1), *args[1:], **kwargs)

    return undo


SLIPS = (
    Slip(("__getitem__",), "the same number of entries from the other end", _moved_slice(_mirrored)),
    Slip(("__getitem__",), "the slice one earlier", _moved_slice(_shifted(-1))),
    Slip(("__getitem__",), "the slice one later", _moved_slice(_shifted(1))),
    Slip(("__getitem__", "select"), "the place one earlier", _other_place(-1)),
    Slip(("__getitem__", "select"), "the place one later", _other_place(1)),
    Slip(("embedding",), "the row one earlier", _looked_up(lambda at, n: at - 1)),
    Slip(("embedding",), "the row one later", _looked_up(lambda at, n: at + 1)),
    Slip(("embedding",), "the rows counted from the other end", _looked_up(lambda at, n: n - 1 - at)),
)
