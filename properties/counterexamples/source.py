"""Source that is pasted into a script: functions of this package, or of a session, with everything that they use."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from veriformer.properties.adapters.places import is_of_a_library
from veriformer.properties.counterexamples.literals import literal
from veriformer.properties.counterexamples.program import UnwritableError
from veriformer.properties.counterexamples.shortening import lean, untyped

_OURS = "veriformer.properties."


class Sources:
    """Functions and classes as source, each name once, what is used before what uses it.

    Attributes:
        imports: lines.
        chunks: source of functions, classes and constants.
    """

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.chunks: list[str] = []
        self._taken: dict[str, Any] = {}
        self._known: list[tuple[Any, str]] = []

    def know(self, value: Any, expression: str) -> None:
        """Say how a value is reached, so that its source is not needed."""
        self._known.append((value, expression))

    def claim(self, name: str, value: Any) -> None:
        """Say that a script has a value under a name already."""
        self._taken[name] = value

    def expression(self, value: Any) -> str:
        """Return what a value is called here, a function above all; the source of it is added.

        Raises:
            UnwritableError: it has none of its own, as a lambda and what was made inside of another function.
        """
        for known, expression in self._known:
            if known is value:
                return expression
        if isinstance(value, functools.partial):
            given = [self.expression(value.func), *(self.expression(a) for a in value.args)]
            given += [f"{k}={self.expression(v)}" for k, v in value.keywords.items()]
            self.imports.add("import functools")
            return f"functools.partial({', '.join(given)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{literal(k)}: {self.expression(v)}' for k, v in value.items())}}}"
        if isinstance(value, list | tuple):
            inner = ", ".join(self.expression(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, set | frozenset):
            return f"{type(value).__name__}([{', '.join(sorted(self.expression(v) for v in value))}])"
        if inspect.isroutine(value) or inspect.isclass(value):
            self._add(value)
            return str(value.__name__)
        return literal(value)

    def _add(self, part: Any, name: str = "") -> None:
        """Add a function or class, under a name of its own or another one."""
        own, module = part.__name__, sys.modules.get(part.__module__)
        name = name or own
        if not self._claims(name, part):
            return
        if "<" in part.__qualname__:
            raise UnwritableError(f"{part.__qualname__} of {part.__module__} was made inside of another function")
        if module is None or vars(module).get(own) is not part:
            raise UnwritableError(f"{part.__module__} has no {own}")
        if is_installed(module):
            self.imports.add(f"from {part.__module__} import {own}" + f" as {name}" * (name != own))
        elif name != own:
            self.chunks.append(f"{name} = {self.expression(part)}")
        else:
            scope = vars(module)
            source = lean(textwrap.dedent(inspect.getsource(scope[own])).rstrip())
            if module.__name__.startswith(_OURS):
                source = untyped(source)
            for used in sorted(set(_names_read(ast.parse(source))) & set(scope)):
                self._use(used, scope[used])
            self.chunks.append(source)

    def _use(self, name: str, value: Any) -> None:
        """Make a name of a module known to what is pasted from there."""
        if inspect.isroutine(value) or inspect.isclass(value):
            self._add(value, name)
        elif self._claims(name, value):
            if isinstance(value, types.ModuleType):
                called = value.__name__
                self.imports.add(f"import {called}" if called == name else f"import {called} as {name}")
            else:
                self.chunks.append(f"{name} = {self.expression(value)}")

    def _claims(self, name: str, value: Any) -> bool:
        """Take a name; whether it was free.

        Raises:
            UnwritableError: another value has it.
        """
        if name in self._taken:
            if self._taken[name] is not value:
                raise UnwritableError(f"two values are called {name!r}")
            return False
        self._taken[name] = value
        return True


def is_installed(module: types.ModuleType) -> bool:
    """Whether a script may import a module: not ours, nor what a person types or runs."""
    if module.__name__.startswith(_OURS) or module.__name__ == "__main__":
        return False
    return "." in module.__name__ or is_of_a_library(module)


def _names_read(tree: ast.AST) -> Iterator[str]:
    """Go through the names that source reads while it runs: not those of its types."""
    types_of_it = (getattr(tree, "annotation", None), getattr(tree, "returns", None))
    for child in ast.iter_child_nodes(tree):
        if child in types_of_it:
            continue
        if isinstance(child, ast.Name):
            yield child.id
        yield from _names_read(child)
