"""What the values of a recorded run are called in its script."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.counterexamples.literals import literal, of_tensor
from veriformer.properties.counterexamples.program import Line, Program, UnwritableError

SMALL = 200
"""Numbers that a reader may still want to see; a larger input is drawn again by the script."""

FEW = 6
"""Numbers that take no more room than the line that draws them."""

_LARGEST = 20_000  # numbers that a script may hold where it cannot draw them again
_SHARED = (bool, int, str, type(None), torch.dtype, torch.device, slice, range)
"""Types of which equal values are one object, wherever they come from."""


class Count(int):
    """A whole number of its own."""


class Text(str):
    """A text of its own."""

    __slots__ = ()


def one_of_its_own(value: Any) -> Any:
    """Return a number or a text that can be told from equal ones; anything else as it is."""
    if type(value) is int:
        return Count(value)
    if type(value) is str:
        return Text(value)
    return value * 1.0 if type(value) is float else value


class Names:
    """Names of values, by identity.

    Every tensor that the check makes has one. It is *given* if it does not depend on the subject, as inputs do: then a
    line about the subject takes its numbers if they are few, else the lines that draw it.

    Args:
        program: gets the lines that define literals.
        small: most numbers of an input that is shown with them, and not drawn again.

    Attributes:
        with_gradients: variables that a backward pass may change.
    """

    def __init__(self, program: Program, small: int = SMALL) -> None:
        self._program, self._small = program, small
        self._names: dict[int, str] = {}
        self._given: set[int] = set()
        self._literals: list[tuple[Tensor, int, str, Tensor | None]] = []
        self._roots: dict[int, set[str]] = {}
        self._keep: list[Any] = []  # an id stays unique only while its object lives
        self._count = 0
        self.with_gradients: set[str] = set()

    def fresh(self, stem: str) -> str:
        """Return a name that was not used before."""
        self._count += 1
        return f"{stem}{self._count}"

    def bind(self, value: Any, expression: str, *, given: bool = False) -> None:
        """Say that a value is called so from here on."""
        self._names[id(value)] = expression
        self._keep.append(value)
        (self._given.add if given else self._given.discard)(id(value))
        if expression and isinstance(value, Tensor) and (place := _storage(value)):
            self._roots.setdefault(place, set()).add(_root(expression))

    def bind_all(self, value: Any, expression: str, *, given: bool = False) -> None:
        """Bind a value and what lies in it, as far as lists, tuples and dicts reach."""
        if _is_shared(value):
            return
        self.bind(value, expression, given=given)
        pairs: Any = ()
        if isinstance(value, dict):
            pairs = value.items()
        elif isinstance(value, list | tuple):
            pairs = enumerate(value)
        for key, item in pairs:
            self.bind_all(item, f"{expression}[{key!r}]", given=given)

    def bind_module(self, module: Any, name: str) -> None:
        """Bind a model, its parts, its parameters and its buffers."""
        self.bind(module, name)
        self.with_gradients.add(name)
        if not isinstance(module, nn.Module):
            return
        for path, part in module.named_modules():
            if path:
                self.bind(part, f"{name}.get_submodule({path!r})")
        for path, parameter in module.named_parameters():
            self.bind(parameter, f"{name}.get_parameter({path!r})")
        for path, buffer in module.named_buffers():
            self.bind(buffer, f"{name}.get_buffer({path!r})")

    def knows(self, value: Any) -> bool:
        """Whether a value has a name."""
        return id(value) in self._names

    def is_given(self, value: Any) -> bool:
        """Whether a value has a name and does not depend on the subject."""
        return id(value) in self._given

    def variable(self, value: Any) -> str:
        """Return the variable that a named value is reached from."""
        return _root(self._names[id(value)])

    def sharing(self, value: Tensor) -> set[str]:
        """Return the names of everything that changes when a tensor is changed in place."""
        own = {_root(self._names[id(value)])} if id(value) in self._names else set()
        return own | self._roots.get(_storage(value), set())

    def expression(self, value: Any, *, drawn: bool = False) -> str:
        """Return the source of a value.

        Args:
            value: a tensor, a plain value, or lists of them.
            drawn: call given tensors by the names that they are drawn under, however small they are.

        Raises:
            UnwritableError: it is an unknown object, or a tensor of unknown origin.
        """
        if isinstance(value, Tensor):
            return self._tensor(value, drawn)
        if isinstance(value, torch.Generator):
            return self._generator(value)
        if id(value) in self._names and not _is_shared(value):
            return self._names[id(value)]
        if isinstance(value, list | tuple):
            return self._several(value, drawn)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{literal(k)}: {self.expression(v, drawn=drawn)}' for k, v in value.items())}}}"
        return literal(value)

    def define(self, value: Tensor, *, named: bool = False) -> str:
        """Return the name of a given tensor, defined by its numbers as they are now; `named` even if it is one number.

        The name stands for that state of the tensor: a change in place makes the next use define another.
        """
        version = -1 if value.is_inference() else value._version
        for known, then, name, _ in self._literals:
            if known is value and then == version:
                return name
        copy = value.detach().clone().cpu()
        earlier = [
            (n, c) for v, _, n, c in self._literals
            if c is not None and c.shape == copy.shape and v.device == value.device and not v.requires_grad
        ]  # fmt: skip
        first, *changes = of_tensor(copy, earlier, value.device)
        needs_grad = value.requires_grad and value.is_leaf
        if copy.numel() <= 1 and not needs_grad and not named:
            return first
        name = self.fresh("x")
        texts = [f"{name} = {first}", *(f"{name}{change}" for change in changes)]
        texts += [f"{name}.requires_grad_()"] * needs_grad
        self._program.lines += [Line.of(text, [name]) for text in texts]
        self._literals.append((value, version, name, copy))
        self._keep.append(value)
        self._roots.setdefault(_storage(value), set()).add(name)
        self.with_gradients |= {name} if needs_grad else set()
        return name

    def changes(self, value: Tensor) -> None:
        """Say that the program is about to change a given tensor, which depends on the subject from then on."""
        drawn = self._names[id(value)] if value.numel() > self._small else ""
        self._now_depends(value, drawn or self.define(value, named=True))

    def changed(self, value: Tensor, version: int) -> None:
        """Say that the subject changed a tensor that it was given at a version."""
        if self.is_given(value):
            named = (name for v, then, name, _ in self._literals if v is value and then == version)
            self._now_depends(value, next(named, self._names[id(value)]))

    def _now_depends(self, value: Tensor, name: str) -> None:
        self._literals = [(v, then, n, None if n == name else copy) for v, then, n, copy in self._literals]
        self.bind(value, name)

    def _tensor(self, value: Tensor, drawn: bool) -> str:
        known = self._names.get(id(value))
        if known is None:
            raise UnwritableError("a tensor from inside of the model, or from before")
        if known and (drawn or not self.is_given(value) or value.numel() > self._small):
            return known
        if value.numel() > _LARGEST:
            raise UnwritableError("too many numbers")
        return self.define(value)

    def _generator(self, value: torch.Generator) -> str:
        if id(value) in self._names:
            return self._names[id(value)]
        seed = value.initial_seed()
        if not torch.equal(value.get_state(), torch.Generator(value.device).manual_seed(seed).get_state()):
            raise UnwritableError("a generator that was used before")
        name = self.fresh("generator")
        self._program.lines.append(Line.of(f"{name} = torch.Generator().manual_seed({seed})", [name]))
        self.bind(value, name, given=True)
        return name

    def forget(self, value: Any) -> None:
        """Say that no name stands for a value any more."""
        self._names.pop(id(value), None)

    def _several(self, values: list[Any] | tuple[Any, ...], drawn: bool) -> str:
        inner = ", ".join(self.expression(v, drawn=drawn) for v in values)
        if isinstance(values, list):
            return f"[{inner}]"
        return f"({inner}{',' if len(values) == 1 else ''})"


def _is_shared(value: Any) -> bool:
    return isinstance(value, _SHARED) and not isinstance(value, Count | Text)


def _storage(value: Tensor) -> int:
    try:
        return value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a wrapper, which has none
        return 0


def _root(expression: str) -> str:
    """Return the variable that an expression starts with."""
    return next(iter(expression.replace(".", "[").split("[")))
