"""Functions written as source: what is judged, what a script pastes and what `veriformer init` prints are one text."""

from __future__ import annotations

import hashlib
import linecache
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_PREFIX = "veriformer.properties.understood_"
USER = "user"
"""What a written function calls the module that holds the user's code."""


def written(source: str, name: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of its source.

    Args:
        source: of a module that defines it; imports are part of it.
        name: of the function.
        names: what it finds in its module besides.
    """
    module = _module(source, names)
    file = str(module.__file__)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[module.__name__] = module
    function: Callable[..., Any] = vars(module)[name]
    return function


def attempt(source: str, name: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function as `written` does, of which nothing stays when it is let go: one that is only tried."""
    function: Callable[..., Any] = vars(_module(source, names))[name]
    return function


def _module(source: str, names: Mapping[str, Any]) -> types.ModuleType:
    key = hashlib.sha256(f"{source}{[(n, id(v)) for n, v in names.items()]}".encode()).hexdigest()[:16]
    module = types.ModuleType(_PREFIX + key)
    module.__file__ = f"<written for you: {key}>"
    vars(module).update(names)
    exec(compile(source, str(module.__file__), "exec"), vars(module))
    return module


def module_behind(function: Any) -> types.ModuleType | None:
    """Return the user's module that a written function calls `user`; None of any other function."""
    if not str(getattr(function, "__module__", "")).startswith(_PREFIX):
        return None
    found = function.__globals__.get(USER)
    return found if isinstance(found, types.ModuleType) else None


def source_of(function: Any) -> str | None:
    """Return the source that a function was written as; None of any other function."""
    module = sys.modules.get(str(getattr(function, "__module__", "")))
    if module is None or not module.__name__.startswith(_PREFIX):
        return None
    return "".join(linecache.getlines(str(module.__file__)))
