"""Rows that one call writes several times: of several sums for one place the last alone is left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.asking import measured_once
from veriformer.properties.causes.tracing.lines import line_of_code, text_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary

_INTEGERS = (torch.int64, torch.int32)
_OF_NO_VALUES = ("__get__", "size", "dim", "numel", "new_zeros", "new_empty", "is_floating_point", "__len__")
"""Calls that read a tensor's shape, dtype or device alone."""


class _Writes(TorchFunctionMode):
    """Notes the first line that writes rows by an index in which some stand several times, or were written before.

    Attributes:
        found: file, line, how many rows are written more than once, and how many in all.
        is_one_call: whether one call writes them so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[str, int, int, int] | None = None
        self.is_one_call = True
        self._written: dict[int, tuple[Tensor, int, set[int]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        index = _index_of(name, args, given)
        if self.found is None and index is not None and index.numel() > 1:
            counts = torch.unique(index, return_counts=True)[1]
            if bool((counts > 1).any()):
                self.found = (*line_of_code(), int((counts > 1).sum()), len(counts))
        base, axis = (args[0], args[1] if name.startswith("index_copy") else 0) if args else (None, 0)
        rows = index if name.startswith("index_copy") else _rows_of(name, args)
        if rows is None or not isinstance(axis, int):
            if name not in _OF_NO_VALUES:
                self._written.pop(id(base), None)  # it is read, or made anew
            return func(*args, **given)
        at = line_of_code()
        out = func(*args, **given)
        self._goes_on(base, base if out is None else out, axis, rows, at)
        return out

    def _goes_on(self, base: Any, out: Any, axis: int, index: Tensor, at: tuple[str, int]) -> None:
        """Take down the rows that a call writes, and whether calls before it wrote some of them."""
        _, on, rows = self._written.get(id(base), (base, axis, set[int]()))
        new = set(index.tolist())
        if on == axis and isinstance(out, Tensor):
            if self.found is None and len(rows & new) > 1:
                self.found, self.is_one_call = (*at, len(rows & new), out.shape[axis]), False
            self._written[id(out)] = (out, axis, rows | new)


def _rows_of(name: str, args: Any) -> Tensor | None:
    """Return the rows `[N]` that an assignment `x[rows] = values` writes, whose values are not one number for all."""
    if name != "__setitem__" or not isinstance(args[1], Tensor) or args[1].ndim != 1:
        return None
    if not isinstance(args[2], Tensor) or args[2].ndim < 2:
        return None
    rows: Tensor = args[1].nonzero().flatten() if args[1].dtype == torch.bool else args[1]
    return rows


def _index_of(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the one index of rows that a call writes by, where it keeps one of several numbers for a row."""
    if name == "__setitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
    elif name in ("index_put_", "index_put") and not (args[3:4] or (kwargs.get("accumulate", False),))[0]:
        index = tuple(args[1])
    elif name in ("index_copy_", "index_copy"):
        index = (args[2],)
    else:
        return None
    rows = [i for i in index if isinstance(i, Tensor) and i.dtype in _INTEGERS and i.ndim == 1]
    return rows[0] if len(rows) == 1 else None


def overwriting_opinion(case: Case, problem: Violation) -> str | None:
    """Say which line writes some rows several times in a plain call, where one does."""
    if not has_ordinary_inputs(case.subject.kind):
        return None
    return measured_once(case, "written several times", lambda: _told(case))


def _told(case: Case) -> str | None:
    built = case.bench.pool.get(case.config(), torch.float32)
    inputs = ordinary(case.subject, built.config, torch.Generator().manual_seed(1), torch.float32)
    try:
        with torch.no_grad(), _Writes() as writes:
            case.call(built, *[x.to(case.bench.device) for x in inputs.tensors], *inputs.extras)
    except SubjectError:
        return None
    if writes.found is None:
        return None
    file, number, several, rows = writes.found
    if not (text := text_of(file, number)):
        return None
    if not writes.is_one_call:
        return (
            f"`{text}` (line {number}) writes {several} of {rows} rows that were written before, and the last of what "
            "is written alone is left: to add them up is index_add, or `+=`"
        )
    return (
        f"`{text}` (line {number}) writes {several} of {rows} rows more than once in one call, and the last of what is "
        "written alone is left: to add them up is index_add, or index_put with accumulate"
    )
