"""Constructors that take modules ready-made: the classes of those, and the functions that put them together."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from veriformer.properties.adapters.places import is_of_a_library, location

_SIDE = re.compile(r"^(src|tgt|trg|source|target|enc|dec)_")
_SHORTEST = 4
"""Letters of a name that tells a class."""
_PROJECT = (".git", "pyproject.toml", "requirements.txt", "README.md")
_KEEP = ("to", "eval", "train", "cuda", "cpu", "float", "half", "double", "bfloat16", "requires_grad_", "apply")
"""What a module is called for that gives the module itself."""
_FILES, _BYTES, _ABOVE = 60, 200_000, 2
"""Files around one that are read, bytes of each, and folders above its own."""


def class_of_part(thing: Any, name: str, annotated: Any) -> type[nn.Module] | None:
    """Return the user's own class of modules that an argument is one of; None where neither type nor name tells it.

    Args:
        thing: class or function that takes the module.
        name: of the argument: `encoder` is an Encoder where the file knows a class of that name alone.
        annotated: type that it says the argument has; None if it says none.
    """
    kinds = _modules(annotated)
    own = [k for k in kinds if _is_own(k)]
    if own:
        return own[0]
    if annotated is not None and nn.Module not in kinds:
        return None
    plain = _SIDE.sub("", name.lower()).replace("_", "")
    module = sys.modules.get(thing.__module__)
    there = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, nn.Module)] if module else []
    own = [v for v in dict.fromkeys(there) if _is_own(v) and v is not thing]
    named = [v for v in own if v.__name__.lower() == plain] or [v for v in own if plain in v.__name__.lower()]
    return named[0] if len(plain) >= _SHORTEST and len(named) == 1 else None


def is_module(annotated: Any) -> bool:
    """Whether a type says that an argument is a module."""
    return bool(_modules(annotated))


def _modules(annotated: Any) -> list[type[nn.Module]]:
    return [k for k in (annotated, *typing.get_args(annotated)) if isinstance(k, type) and issubclass(k, nn.Module)]


def _is_own(cls: type) -> bool:
    module = inspect.getmodule(cls)
    return module is not None and not is_of_a_library(module)


def made_by(thing: Any) -> str:
    """Return, as the beginning of a sentence, which functions of the files around make a thing; "" if none does.

    Args:
        thing: class whose calls are looked for; nothing is imported or run.
    """
    file = Path(location(sys.modules.get(thing.__module__)))
    if file.suffix != ".py" or not file.is_file():
        return ""
    found = [
        f"{near.relative_to(folder)}:{name}"
        for folder in [file.parents[min(_ABOVE, len(file.parents) - 1)]]
        for near in _near(file)
        for name in _makers(near, thing.__name__)
    ]
    return (
        f"{' and '.join(found[:2])} make{'s' * (len(found) == 1)} one, and can be judged instead; or " if found else ""
    )


def returns_a_module(function: Any) -> bool:
    """Whether the source of a function calls a class of modules that stands beside it, and gives what that made."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    there = {n for n, v in function.__globals__.items() if isinstance(v, type) and issubclass(v, nn.Module)}
    called = {_last(c.func) for c in ast.walk(tree) if isinstance(c, ast.Call)}
    return any(_makes(node, name) for node in tree.body for name in there & called)


def _near(file: Path) -> list[Path]:
    """Return the files of the folder of a file, and of those above that are of one project with it."""
    near = dict.fromkeys(sorted(file.parent.glob("*.py")))
    for folder in list(file.parents)[1 : _ABOVE + 1]:
        if any((folder / sign).exists() for sign in _PROJECT) or any(folder.glob("*.py")):
            near |= dict.fromkeys(sorted({*folder.glob("*.py"), *folder.glob("*/*.py")}))
    return [path for path in near if not path.parent.name.startswith(".") and not path.parent.is_symlink()][:_FILES]


def _makers(file: Path, name: str) -> Iterator[str]:
    """Yield the functions of a file that call a class and return what they made of it."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")[:_BYTES]
        tree = ast.parse(text) if name in text else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _makes(node, name):
            yield node.name


def _makes(node: ast.stmt, name: str) -> bool:
    """Whether a function calls a class and returns what that made."""
    calls = [c for c in ast.walk(node) if isinstance(c, ast.Call) and _last(c.func) == name]
    kept = {t.id for a in ast.walk(node) if isinstance(a, ast.Assign) and a.value in calls
            for t in a.targets if isinstance(t, ast.Name)}  # fmt: skip
    returned = [_itself(r.value) for r in ast.walk(node) if isinstance(r, ast.Return)]
    return any(value in calls or (isinstance(value, ast.Name) and value.id in kept) for value in returned)


def _itself(value: ast.expr | None) -> ast.expr | None:
    """Return what stands before `.to(device)`, `.eval()` and the like."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _KEEP:
        value = value.func.value
    return value


def _last(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
