"""Where a graph is cut: every detach, no_grad or conversion to a number that a run meets, each undone by itself.

A cut is named only if the gradient is right without it: right code detaches too (a maximum that cancels, a counter).
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OURS = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_CUTS = {"detach", "detach_", "item", "tensor", "as_tensor", "new_tensor"}
HOOK = "a hook on the gradient"
_MAXIMUM = re.compile(r"(?<![a-z_])(a?max|maximum)\(")
_MOST = 12  # cuts that are tried one by one


@dataclass(frozen=True)
class Cut:
    """One place in the code of a subject where the graph ends.

    Attributes:
        what: `detach`, `no_grad`, `data`, `hook`, ...
        file: of the code.
        line: in it.
        function: whose line it is.
    """

    what: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Say it: the line of code itself where it can be read."""
        code = linecache.getline(self.file, self.line).strip().rstrip(":")
        code = code if len(code) <= 90 else f"{code[:87]}..."
        place = f"{Path(self.file).name}:{self.line}, in {self.function}"
        return f"`{code}` ({place})" if code else f"{self.what} ({place})"


class CutWatch(TorchFunctionMode):
    """Notes the cuts that are met, and leaves out those that are to be undone.

    Attributes:
        met: in order, each once.
    """

    def __init__(self, undone: frozenset[Cut] = frozenset()) -> None:
        super().__init__()
        self.met: list[Cut] = []
        self._undone = undone

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        what = _what(func, args)
        cut = _place(what) if what else None
        if cut is None:
            return func(*args, **given)
        if cut not in self.met:
            self.met.append(cut)
        if cut not in self._undone:
            return func(*args, **given)
        if what == "no_grad":
            return None
        if what == HOOK:
            return _NoHandle()
        source = args[1] if what == "new_tensor" else args[0]
        return source.view_as(source) if what in ("detach", "data") else source


class _NoHandle:
    def remove(self) -> None:
        """Nothing was put there."""


def _what(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name a cut that a call is; empty where it is none."""
    if func is torch._C._set_grad_enabled:
        return "no_grad" if args and args[0] is False and torch.is_grad_enabled() else ""
    if not torch.is_grad_enabled():
        return ""
    name = getattr(func, "__name__", "")
    if name == "__get__" and getattr(func, "__self__", None) is Tensor.__dict__.get("data", torch._C.TensorBase.data):
        name = "data"
    elif name == "register_hook":
        return HOOK
    elif name not in _CUTS:
        return ""
    source = args[1] if name == "new_tensor" and len(args) > 1 else args[0] if args else None
    return name if isinstance(source, Tensor) and source.requires_grad else ""


def is_of_the_subject(file: str) -> bool:
    """Whether code is neither ours nor torch's."""
    return not file.startswith((_OURS, _TORCH, "<frozen"))


def _place(what: str) -> Cut | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_the_subject(file):
            return Cut(what, file, frame.f_lineno, frame.f_code.co_qualname)
        if file.startswith(_OURS) and "diagnosis" not in file:
            return None  # it is the engine's own
        frame = frame.f_back
    return None


def decisive_cuts(run: Callable[[frozenset[Cut]], tuple[bool, list[Cut]]], is_partial: bool) -> list[Cut]:
    """Return the one cut without which a gradient is right, or the few that it takes together; empty if there is none.

    Args:
        run: with these cuts left out, whether it is, and the cuts that are met.
        is_partial: whether every gradient is there, if not whole: then a maximum that is held constant is spared.
    """
    cuts = [cut for cut in run(frozenset())[1] if not (is_partial and _is_a_maximum(cut))][:_MOST]
    alone = [cut for cut in cuts if _holds(run, frozenset({cut}))]
    if alone:
        return alone[:1]
    together = frozenset(cuts)
    for _ in range(2):  # what stands inside a block without gradients is met only when that is left out
        met = _met(run, together)[:_MOST]
        together |= frozenset(cut for cut in met if not (is_partial and _is_a_maximum(cut)))
    if not together or not _holds(run, together):
        return []
    for cut in sorted(together, key=lambda c: (c.file, c.line)):
        without = together - {cut}
        together = without if _holds(run, without) else together
    return sorted(together, key=lambda c: (c.file, c.line)) if len(together) <= 3 else []


def _is_a_maximum(cut: Cut) -> bool:
    """Whether a maximum is held constant: it cancels in a right softmax, and in a wrong one that is what is wrong."""
    return _MAXIMUM.search(linecache.getline(cut.file, cut.line)) is not None


def _met(run: Callable[[frozenset[Cut]], tuple[bool, list[Cut]]], undone: frozenset[Cut]) -> list[Cut]:
    try:
        return run(undone)[1]
    except Exception:  # as in `_holds`
        return []


def _holds(run: Callable[[frozenset[Cut]], tuple[bool, list[Cut]]], undone: frozenset[Cut]) -> bool:
    try:
        return run(undone)[0]
    except Exception:  # a tensor where the code needs a number, say: nothing is known of these cuts
        return False
