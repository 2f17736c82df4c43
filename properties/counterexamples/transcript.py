"""Recording one run of a check as a straight-line program: calls of the subject, and what is done with the outputs.

A failing case is run once more under a `Recorder`. What does not depend on the subject becomes a literal, what
does becomes a line of torch code, so that the script made of it needs neither the check nor this package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from veriformer.properties.counterexamples.literals import literal, of_tensor
from veriformer.properties.subject.paths import DEFAULT, Path

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "matmul": "@", "pow": "**", "and": "&", "or": "|",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_UNARY = {"neg": "-", "invert": "~"}
_SILENT = (
    "__repr__",
    "__format__",
    "__hash__",
    "__len__",
    "dim",
    "size",
    "numel",
    "data_ptr",
    "stride",
    "is_floating_point",
)


@dataclass
class Line:
    """One statement.

    Attributes:
        text: source.
        makes: names that it defines or changes.
        needs: names that it reads.
        is_effect: kept whenever something that it changes is used (in-place operations, backward).
    """

    text: str
    makes: tuple[str, ...]
    needs: tuple[str, ...]
    is_effect: bool = False


@dataclass
class Judged:
    """The comparison that failed.

    Attributes:
        kind: "close", "exact", "differs", "finite" or "require".
        got: expression for what the subject gave, or "".
        expected: expression for what is required, or "".
        unit: size of one unit of error, as an expression.
        limit: largest error allowed, in units.
    """

    kind: str
    got: str = ""
    expected: str = ""
    unit: str = "1.0"
    limit: float = 0.0


@dataclass
class Transcript:
    """A recorded run.

    Attributes:
        lines: statements in order.
        models: name to the built model (`Built`) behind it.
        judged: the comparison that ended the run.
        parts: callables of the subject that are used ("forward", "weights", ...).
    """

    lines: list[Line] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    judged: Judged | None = None
    parts: list[str] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Records while it is entered; steps aside while the subject itself runs."""

    def __init__(self, parts: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.transcript = Transcript()
        self.path: Path = DEFAULT
        self._parts = {id(function): name for name, function in parts.items()}
        self._names: dict[int, str] = {}
        self._keep: list[Any] = []  # an id stays unique only while its object lives
        self._literals: list[tuple[Tensor, int, str, Tensor]] = []
        self._count = 0
        self._is_aside = False

    # what the engine reports ------------------------------------------------------------------------------------

    def know_model(self, built: Any) -> None:
        """Name a built model."""
        if built.module is not None and id(built.module) not in self._names:
            name = "model" if not self.transcript.models else f"model_{len(self.transcript.models) + 1}"
            self._bind(built.module, name)
            self.transcript.models[name] = built

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Step aside while the subject runs, so that it takes the same paths as without a recorder."""
        if self._is_aside:  # torch has already taken the mode off while it reports to us
            yield
            return
        self._is_aside = True
        # a check may hold a mode of its own, which then is on top and must stay
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in above:
                _pop_mode()
            _push_mode(self)
            for mode in reversed(above):
                _push_mode(mode)
            self._is_aside = False

    def called(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Record one call of the subject; `args` are as they were before the call."""
        part = self._parts.get(id(function), "forward")
        if part not in self.transcript.parts:
            self.transcript.parts.append(part)
        if part == "forward" and (not args or id(args[0]) not in self._names):
            args = (None, *args)  # the model itself was called, or there is none
        given = [self._placed(a) for a in args] + [f"{k}={self._expression(v)}" for k, v in kwargs.items()]
        name = self._fresh("y" if isinstance(output, Tensor) else "parts")
        text = f"{name} = {part}({', '.join(given)})"
        self._emit(self._on_path(text), (name,), output, name)

    def cut_at_embedding(self, module: Any, tokens: Tensor, leaf: Tensor) -> None:
        """Tell that the call recorded last ran with its graph cut at the embedding of `tokens`."""
        line = self.transcript.lines[-1]
        (output,) = line.makes
        name = self._fresh("embedded")
        before, call = line.text.split(f"{output} = ", 1)
        call, *rest = call.split("\n")
        shown = f"{self._expression(module)}, {self._expression(tokens)}"
        text = "\n".join([f"{before}{name}, {output} = at_embedding({shown}, lambda: {call})", *rest])
        self.transcript.lines[-1] = Line(text, (name, output), _names_in(text))
        self._bind(leaf, name)
        if "at_embedding" not in self.transcript.parts:
            self.transcript.parts.append("at_embedding")

    def judge(self, kind: str, got: Any = None, expected: Any = None, unit: Any = 1.0, limit: float = 0.0) -> None:
        """Record the comparison that is about to be made; the last one before the violation counts."""
        shown = [self._expression(v.detach() if isinstance(v, Tensor) and id(v) not in self._names else v)
                 if v is not None else "" for v in (got, expected, unit)]  # fmt: skip
        self.transcript.judged = Judged(kind, shown[0], shown[1], shown[2], limit)

    # what torch reports -----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._is_aside = True
        try:
            return self._recorded(func, args, kwargs or {})
        finally:
            self._is_aside = False

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = list(_leaves((args, kwargs)))
        text = self._written(func, args, kwargs) if any(id(v) in self._names for v in given) else None
        tensors = [v for v in given if isinstance(v, Tensor) and not v.is_inference()]
        before = [v._version for v in tensors]
        result = func(*args, **kwargs)
        if text is None:
            return result
        changed = [v for v, version in zip(tensors, before, strict=True) if v._version != version]
        if changed or result is None:
            names = tuple(self._names[id(v)] for v in changed if id(v) in self._names)
            self.transcript.lines.append(Line(text, names, _names_in(text), is_effect=True))
            if isinstance(result, Tensor) and id(result) not in self._names and changed:
                self._bind(result, self._expression(changed[0]))
        elif any(isinstance(v, Tensor) for v in _leaves((result,))):
            name = self._fresh("t")
            self._emit(f"{name} = {text}", (name,), result, name)
        return result

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        name = getattr(func, "__name__", "")
        if name in _SILENT:
            return None
        shown = [self._expression(a) for a in args]
        named = [f"{k}={self._expression(v)}" for k, v in kwargs.items() if v not in _defaults(func, k)]
        if name == "__get__":
            return f"{shown[0]}.{func.__self__.__name__}"
        if name == "__getitem__":
            return f"{shown[0]}[{self._index(args[1])}]"
        if name == "__setitem__":
            return f"{shown[0]}[{self._index(args[1])}] = {shown[2]}"
        bare = name.strip("_")
        is_dunder = name.startswith("__")
        if is_dunder and bare in _UNARY:
            return f"({_UNARY[bare]}{shown[0]})"
        if is_dunder and len(shown) == 2 and bare in _BINARY:
            return f"({shown[0]} {_BINARY[bare]} {shown[1]})"
        if is_dunder and len(shown) == 2 and bare.removeprefix("r") in _BINARY:
            return f"({shown[1]} {_BINARY[bare.removeprefix('r')]} {shown[0]})"
        if getattr(torch.Tensor, name, None) is func:
            return f"{shown[0]}.{name}({', '.join(shown[1:] + named)})"
        for module, prefix in ((torch, "torch"), (torch.autograd, "torch.autograd"), (torch.linalg, "torch.linalg"),
                               (torch.nn.functional, "torch.nn.functional")):  # fmt: skip
            if getattr(module, name, None) is func or (module is torch.linalg and name.startswith("linalg_")):
                return f"{prefix}.{name.removeprefix('linalg_')}({', '.join(shown + named)})"
        return f"torch.{name}({', '.join(shown + named)})"

    def _index(self, index: Any) -> str:
        if isinstance(index, tuple):
            return ", ".join(self._index(i) for i in index)
        if isinstance(index, slice):
            ends = ["" if end is None else self._expression(end) for end in (index.start, index.stop, index.step)]
            return ":".join(ends[:2] if index.step is None else ends)
        return self._expression(index)

    # names and literals -----------------------------------------------------------------------------------------

    def _bind(self, value: Any, name: str) -> None:
        self._names[id(value)] = name
        self._keep.append(value)

    def _fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def _emit(self, text: str, makes: tuple[str, ...], output: Any, name: str) -> None:
        self.transcript.lines.append(Line(text, makes, _names_in(text)))
        self._name_all(output, name)

    def _name_all(self, output: Any, expression: str) -> None:
        if isinstance(output, Tensor) or not isinstance(output, tuple | list | dict):
            if output is not None and not isinstance(output, bool | int | float | str):
                self._bind(output, expression)
            return
        self._bind(output, expression)
        pairs = output.items() if isinstance(output, dict) else enumerate(output)
        for key, value in pairs:
            self._name_all(value, f"{expression}[{key!r}]")

    def _placed(self, value: Any) -> str:
        """Return an argument as an expression, in the layout of the path."""
        shown = self._expression(value)
        if self.path.layout and isinstance(value, Tensor) and value.ndim >= 2:
            return f"laid_out({shown}, {self.path.layout!r})"
        return shown

    def _on_path(self, text: str) -> str:
        if self.path.compiled:
            text = text.replace("forward(", "torch.compile(forward, dynamic=True)(", 1)
        modes = {"no_grad": "torch.no_grad()", "inference": "torch.inference_mode()"}
        contexts = [modes[self.path.mode]] if self.path.mode in modes else []
        if self.path.backend != "default":
            contexts.append(f"backends[{self.path.backend!r}]()")
        if self.path.autocast:
            contexts.append("torch.autocast('cpu', dtype=torch.bfloat16)")
        if contexts:
            text = f"with {', '.join(contexts)}:\n    {text}"
        return f"model.train()\n{text}\nmodel.eval()" if self.path.training else text

    def _expression(self, value: Any) -> str:
        if id(value) in self._names and not isinstance(value, bool | int | float | str | None):
            return self._names[id(value)]
        if isinstance(value, Tensor):
            return self._literal(value)
        if isinstance(value, tuple | list):
            inner = ", ".join(self._expression(v) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        return literal(value)

    def _literal(self, value: Tensor) -> str:
        for known, version, name, _ in self._literals:
            if known is value and (value.is_inference() or known._version == version):
                return name
        with self.aside():
            copy = value.detach().clone().cpu()
            earlier = [(n, c) for _, _, n, c in self._literals if c.shape == copy.shape and c.dtype == copy.dtype]
            text = of_tensor(copy, earlier, value.device)
        if copy.numel() <= 1 and "\n" not in text:
            return text
        name = self._fresh("x")
        grad = ".requires_grad_()" if value.requires_grad and value.is_leaf else ""
        needs = _names_in(text)
        first, *more = text.split("\n")
        self.transcript.lines.append(Line(f"{name} = {first}{grad if not more else ''}", (name,), needs))
        self.transcript.lines.extend(Line(f"{name}{rest}", (name,), (), is_effect=True) for rest in more)
        self._literals.append((value, -1 if value.is_inference() else value._version, name, copy))
        self._keep.append(value)
        return name


def _defaults(func: Any, keyword: str) -> tuple[Any, ...]:
    """Return the default of a keyword as a tuple of none or one, so that scripts leave it out."""
    if func is not torch.autograd.grad:
        return ()
    parameter = inspect.signature(func).parameters.get(keyword)
    return () if parameter is None or parameter.default is parameter.empty else (parameter.default,)


def _names_in(text: str) -> tuple[str, ...]:
    words: list[str] = []
    word = ""
    for letter in text + " ":
        if letter.isalnum() or letter == "_":
            word += letter
        elif word:
            words.append(word)
            word = ""
    return tuple(words)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool | int | float | str | torch.dtype | slice):
        yield value


def needed(transcript: Transcript) -> list[Line]:
    """Return the lines that the failed comparison rests on; every call of the subject if it names no tensor."""
    judged = transcript.judged
    if judged is not None and judged.got:
        wanted = set(_names_in(f"{judged.got} {judged.expected} {judged.unit}"))
    else:
        wanted = set(outputs_of(transcript))
    kept: list[Line] = []
    for line in reversed(transcript.lines):
        if wanted & set(line.makes) or (line.is_effect and wanted & set(line.needs)):
            wanted |= set(line.needs)
            kept.append(line)
    return kept[::-1]


def outputs_of(transcript: Transcript) -> list[str]:
    """Return the names of what the subject returned, in order."""
    return [n for line in transcript.lines for n in line.makes if n.startswith("y") and n[1:].isdigit()]
