"""Which functions of the subject's own code a run goes through, on which lines, and what their names stand for."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

_HOME = Path(__file__).parents[3]
OURS = tuple(str(_HOME / room) for room in ("properties", "reference"))
"""What judges, and what it judges by: no change of it mends a subject."""
_LIBRARIES = tuple(
    {str(Path(torch.__file__).parent), *(sysconfig.get_paths()[n] for n in ("stdlib", "purelib", "platlib"))}
)
_MOST_EVENTS = 200_000
"""Lines of a run that are noted: a longer one is not looked at."""


@dataclass
class Executed:
    """A function that stands in a file by itself or in a class, with what is defined inside it.

    Attributes:
        file: that it stands in.
        name: its qualified name.
        functions: the objects that run its code.
        lines: that were gone through.
        kinds: by the name of a variable, or of an attribute (`self.scale`), what sort of value it stands for.
    """

    file: str
    name: str
    functions: list[FunctionType]
    lines: set[int] = field(default_factory=set)
    kinds: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class _Watch:
    """Notes what a run goes through, in the subject's own code.

    Attributes:
        lines: by code, how often each was gone through.
        kinds: by code, of its variables and attributes when it returned.
        functions: by code, the object that runs it, where it is found.
        events: lines that were noted.
    """

    def __init__(self) -> None:
        self.lines: dict[CodeType, Counter[int]] = {}
        self.kinds: dict[CodeType, dict[str, tuple[Any, ...]]] = {}
        self.functions: dict[CodeType, FunctionType] = {}
        self.events = 0

    def enter(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if (
            code.co_filename.startswith(("<", *OURS))
            or _is_of_a_library(code.co_filename)
            or self.events > _MOST_EVENTS
        ):
            return None
        if code not in self.lines:
            self.lines[code] = Counter()
            if (function := _function_of(frame)) is not None:
                self.functions[code] = function
        return self.step

    def step(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        self.events += 1
        if event == "line":
            self.lines[frame.f_code][frame.f_lineno] += 1
        elif event == "return":
            known = self.kinds.setdefault(frame.f_code, {})
            for name in frame.f_code.co_names:
                if isinstance(value := frame.f_globals.get(name), int | float):
                    known[name] = kind_of(value)
            for name, value in frame.f_locals.items():
                known[name] = kind_of(value)
                if name == "self":
                    known.update({f"self.{n}": kind_of(v) for n, v in _attributes(value)})
        return self.step


def _function_of(frame: FrameType) -> FunctionType | None:
    """Return the function whose code a frame runs: one of the class of its first argument, or one of its file."""
    code = frame.f_code
    holder = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    classes = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
    for owner in classes:
        for name in (code.co_name, f"_{owner.__name__.lstrip('_')}{code.co_name}"):
            if (found := _unwrapped(vars(owner).get(name), code)) is not None:
                return found
    if "<locals>" in code.co_qualname:
        return None
    first, *rest = code.co_qualname.split(".")
    thing = frame.f_globals.get(first)
    for name in rest:
        thing = vars(thing).get(name) if isinstance(thing, type) else None
    return _unwrapped(thing, code)


def _unwrapped(thing: Any, code: CodeType) -> FunctionType | None:
    """Return the function of some code that a property, a decorator or a cache holds."""
    for _ in range(8):
        if isinstance(thing, FunctionType) and thing.__code__ is code:
            return thing
        inner = getattr(thing, "__func__", None) or getattr(thing, "fget", None) or getattr(thing, "__wrapped__", None)
        if inner is None:
            return None
        thing = inner
    return None


def _is_of_a_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file


def _attributes(value: Any) -> list[tuple[str, Any]]:
    own = dict(getattr(value, "__dict__", {}))
    held = [own.pop(room, None) or {} for room in ("_parameters", "_buffers", "_modules")]
    return [(n, v) for room in (own, *held) for n, v in room.items() if not n.startswith("_")]


def kind_of(value: Any) -> tuple[Any, ...]:
    """Return what sort of value it is: one may stand in the place of another of its sort."""
    if isinstance(value, Tensor):
        return (Tensor, value.ndim, value.dtype)
    return (type(value),)


def lines_of(run: Callable[[], object]) -> Counter[tuple[str, int]]:
    """Return the lines of the subject's own code that a run goes through, (file, line), and how often each."""
    return Counter(
        {(code.co_filename, line): n for code, lines in _watched(run).lines.items() for line, n in lines.items()}
    )


def _watched(run: Callable[[], object]) -> _Watch:
    watch, before = _Watch(), sys.gettrace()
    sys.settrace(watch.enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return watch


def executed_by(run: Callable[[], object]) -> list[Executed]:
    """Return the functions of the subject's own code that a run goes through, in the order of their first call."""
    watch = _watched(run)
    if watch.events > _MOST_EVENTS:
        return []
    found: dict[tuple[str, str], Executed] = {}
    for code, function in watch.functions.items():
        key = (code.co_filename, code.co_qualname)
        found.setdefault(key, Executed(*key, [])).functions.append(function)
    for code, lines in watch.lines.items():
        outside = code.co_qualname
        while (code.co_filename, outside) not in found and ".<locals>" in outside:
            outside = outside.rpartition(".<locals>")[0]
        if (owner := found.get((code.co_filename, outside))) is not None:
            owner.lines |= set(lines)
            owner.kinds |= watch.kinds.get(code, {})
    return [one for one in found.values() if "<lambda>" not in one.name]
