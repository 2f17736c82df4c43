"""What an argument that means no size becomes: by its type, or by what the code compares it with."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from veriformer.properties.adapters.places import is_of_a_library

_COUNTED = re.compile(r"\w+_(size|dim|len|length|num|count|rank|groups|steps|width|depth)|(n|num)_\w+|rank|groups")
_MOST = 20
"""Modules that are read."""
_EXCLUDED = (int, float, str, bytes, bool, list, dict, tuple, set, type, object)


def choice_of(thing: Any, name: str, annotated: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the source of a value for a required argument, and the names that it uses; None where nothing is known.

    A switch is off; of an enumeration and of literals the first is taken, and of words that the code of the class
    compares it with.

    Args:
        thing: class or function that takes it.
        name: of the argument.
        annotated: type that it says the argument has; None if it says none.
    """
    kinds = [one for one in (annotated, *typing.get_args(annotated)) if one is not None]
    if type(None) in kinds:
        return "None", {}
    if bool in kinds:
        return "False", {}
    for one in kinds:
        if isinstance(one, type) and issubclass(one, enum.Enum) and list(one):
            return f"{one.__name__}.{next(iter(one)).name}", {one.__name__: one}
    if typing.get_origin(annotated) is typing.Literal:
        return repr(typing.get_args(annotated)[0]), {}
    if kinds and str not in kinds:
        return None
    found = next((word for text in _sources(thing) for at, word in _compared(text) if at == name), None)
    return None if found is None else (repr(found), {})


def guess_of(annotated: Any, name: str = "") -> str | None:
    """Return the source of a number for an argument of which nothing is known but that it is one.

    Args:
        annotated: type that it says it has; None if it says none.
        name: of the argument, which tells a number where no type does.

    >>> guess_of(int), guess_of(float), guess_of(None), guess_of(None, "chunk_size")
    ('2', '0.1', None, '2')
    """
    if annotated is None and _COUNTED.fullmatch(name.lower()):
        return "2"
    return {int: "2", float: "0.1"}.get(annotated)


def settings_of(annotated: Any) -> type | None:
    """Return the class of somebody's own that an argument is annotated with, where it may hold settings."""
    for one in (annotated, *typing.get_args(annotated)):
        if isinstance(one, type) and one not in _EXCLUDED and one.__module__ not in ("builtins", "typing", "torch"):
            return None if callable(getattr(one, "forward", None)) or issubclass(one, enum.Enum) else one
    return None


def by_type(annotated: Any) -> str | None:
    """Return the source of a value for a field of settings that a model does not size itself by.

    >>> by_type(str), by_type(float), by_type(int)
    ("''", '0.0', None)
    """
    return {str: "''", float: "0.0", bool: "False"}.get(annotated)


@cache
def _sources(thing: Any) -> tuple[str, ...]:
    """Return the source of the module of a thing, and of those of the user's own that it is made of."""
    waiting, seen = [inspect.getmodule(thing)], dict[str, str]()
    while waiting and len(seen) < _MOST:
        module = waiting.pop(0)
        if not isinstance(module, types.ModuleType) or is_of_a_library(module) or module.__name__ in seen:
            continue
        try:
            seen[module.__name__] = inspect.getsource(module)
        except (OSError, TypeError):
            seen[module.__name__] = ""
        waiting += [inspect.getmodule(part) for part in vars(module).values() if isinstance(part, type)]
    return tuple(seen.values())


def _compared(source: str) -> Iterator[tuple[str, str]]:
    """Yield each name, or last part of one, that is compared with a word, with that word."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.In | ast.NotEq | ast.NotIn):
            named, other = node.left, node.comparators[0]
            name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
            parts = other.elts if isinstance(other, ast.Tuple | ast.List | ast.Set) else [other]
            for part in parts:
                if name and isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield name, part.value
