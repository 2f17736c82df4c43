"""Calls of torch as lines of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.counterexamples.names import Names
from veriformer.properties.counterexamples.program import Line, Program, UnwritableError
from veriformer.properties.counterexamples.writing import is_in_place, leaves_of, written


class Tracing:
    """Runs what a check calls of torch, and writes it down.

    Args:
        program: gets the lines.
        names: of the values so far.
        expression: `expression(value, drawn=...)`, the source of an argument.
    """

    def __init__(self, program: Program, names: Names, expression: Callable[..., str]) -> None:
        self._program = program
        self._names = names
        self._expression = expression

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return `func(*args, **kwargs)`. What cannot be written down leaves its results without a name."""
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(self.run(torch.Tensor.unbind, args, {}))
        leaves = list(leaves_of((args, kwargs)))
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        depends = any(self._names.knows(v) and not self._names.is_given(v) for v in leaves)
        given = not depends and all(self._names.is_given(v) for v in tensors)
        if is_in_place(name) and depends and self._names.is_given(args[0]):
            self._names.changes(args[0])
        counted = [v for v in tensors if not v.is_inference()]
        versions = [v._version for v in counted]
        try:
            text = written(func, args, kwargs, lambda value: self._expression(value, drawn=given))
        except UnwritableError:
            text = None
        result = func(*args, **kwargs)
        generators = [v for v in leaves if isinstance(v, torch.Generator)]
        if text is None:
            self._lose(result, generators, given)
            return result
        changed = [v for v, version in zip(counted, versions, strict=True) if v._version != version]
        if changed or result is None or is_in_place(name):
            self._write_change(text, name, changed or tensors[:1])
        elif not any(result is v for v in tensors):
            self._write_result(text, result, generators, given)
        return result

    def _write_change(self, text: str, name: str, changed: list[Tensor]) -> None:
        makes = {root for v in changed for root in self._names.sharing(v)}
        if name == "backward":
            makes |= self._names.with_gradients
        if not torch.is_grad_enabled() and any(v.requires_grad for v in changed):
            text = f"with torch.no_grad():\n    {text}"
        self._program.lines.append(Line.of(text, makes))

    def _write_result(self, text: str, result: Any, generators: list[torch.Generator], given: bool) -> None:
        if isinstance(result, float):
            if not given:
                self._names.bind(result, text)
            return
        if not isinstance(result, list) and not any(isinstance(v, Tensor) for v in leaves_of((result,))):
            return
        name = self._names.fresh("t")
        drawn = [self._names.expression(generator) for generator in generators]
        self._program.lines.append(Line.of(f"{name} = {text}", [name, *drawn]))
        self._names.bind_all(result, name, given=given)

    def _lose(self, result: Any, generators: list[torch.Generator], given: bool) -> None:
        """Leave a result without a name; one that does not depend on the subject is known by its numbers all the same.

        A generator that was used in an unknown way is none that a script can go on with.
        """
        for generator in generators:
            self._names.forget(generator)
        if given:
            for value in leaves_of((result,)):
                if isinstance(value, Tensor) and not self._names.knows(value):
                    self._names.bind(value, "", given=True)
