"""Recording one run of a check as a straight-line program: calls of the subject, and what is done with the outputs.

A failing case is run once more under a `Recorder`. What does not depend on the subject becomes numbers, or the lines
that draw them; what does becomes a line of torch code. So the script made of it needs neither the check nor this
package. What cannot be written down leaves its results without a name, and a judgement of them without a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from veriformer.properties.bench.pool import Built
from veriformer.properties.counterexamples.literals import literal
from veriformer.properties.counterexamples.names import Names, one_of_its_own
from veriformer.properties.counterexamples.program import MADE, MODULE, Judged, Line, Program, UnwritableError
from veriformer.properties.counterexamples.writing import written
from veriformer.properties.engine.calling import Caller
from veriformer.properties.subject.paths import DEFAULT, Path
from veriformer.properties.subject.subject import Subject

PARTS = (
    "build", "forward", "weights", "embed", "cache", "generate", "projections", "accumulate", "decode", "train",
    "words", "vocabulary", "merges", "scores",
)  # fmt: skip
"""Callables of a subject."""

_CHANGING = ("add", "sub", "mul", "truediv", "div", "pow", "and", "or")
"""Operators that have a form of their own which changes what stands on the left."""


class Recorder(TorchFunctionMode):
    """Records while it is entered; steps aside while the subject itself runs.

    Attributes:
        program: so far.
        path: how the subject is called next.
    """

    def __init__(self, subject: Subject, device: torch.device) -> None:
        super().__init__()
        self.program = Program()
        self.path: Path = DEFAULT
        self._subject = subject
        self._device = device
        self._parts = {id(part): name for name in PARTS if (part := getattr(subject, name)) is not None}
        self._names = Names(self.program)
        self._models: dict[str, Any] = {}
        self._is_aside = False
        self._is_muted = False

    # what the bench and the case report ------------------------------------------------------------------------

    def know_model(self, built: Built) -> None:
        """Name a model that was built, or the instance that was given."""
        if built.module is None or self._names.knows(built.module) or self._is_muted:
            return
        if built.is_fresh:
            where = "" if self._device.type == "cpu" else f", device='{self._device}'"
            raw = ", redrawn=False" if built.is_raw else ""
            making = f"{MADE}({self._names.expression(built.config)}, {built.dtype}{raw}{where})"
        elif built.module is self._subject.module:
            making = MODULE
        else:
            making = f"copy.deepcopy({MODULE}).to({built.dtype}).eval()"
        self._name_model(built.module, making)

    def copied(self, module: Any, twin: Any) -> None:
        """Tell that a model was copied."""
        if self._names.knows(module) and not self._is_muted:
            self._name_model(twin, f"copy.deepcopy({self._names.expression(module)})")

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Return `run()`, a call of the subject with these arguments, and write it down."""
        with self._aside():
            before = torch.get_rng_state()
            tensors = [a for a in args if isinstance(a, Tensor) and not a.is_inference()]
            versions = [a._version for a in tensors]
            try:
                text = None if self._is_muted else self._calling(function, args, kwargs)
            except UnwritableError:
                text = None
            output = run()
            if text is None:
                return output
            draws = not torch.equal(before, torch.get_rng_state())
            output = one_of_its_own(output)
            name = self._names.fresh("y" if isinstance(output, Tensor) else "parts")
            trained = next((a for a in (function, *args) if isinstance(a, nn.Module)), None)
            draws = draws or (trained is not None and trained.training)
            text = _seeded(f"{name} = {text}", before) if draws else f"{name} = {text}"
            makes = [name]
            for value, version in zip(tensors, versions, strict=True):
                if value._version != version:
                    self._names.changed(value, version)
                    makes += self._names.sharing(value)
            self.program.lines.append(Line.of(self._around(trained, text), makes, is_call=True))
            if isinstance(output, nn.Module):
                self._names.bind_module(output, name)
            self._names.bind_all(output, name)
            self.path = DEFAULT
            return output

    def apply(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return `function(*args)`, written down as that call; its source goes into the script."""
        with self._aside():
            try:
                given = None if self._is_muted else ", ".join(self._expression(a) for a in args)
            except UnwritableError:
                given = None
            muted, self._is_muted = self._is_muted, True
            try:
                output = function(*args)
            finally:
                self._is_muted = muted
            if given is None:
                return output
            output = one_of_its_own(output)
            self.program.pasted[function.__name__] = function
            name = self._names.fresh("t" if isinstance(output, Tensor) else "parts")
            asks = any(isinstance(a, Caller) for a in args)
            changed = {self._names.variable(a) for a in args if isinstance(a, nn.Module)}
            text = f"{name} = {function.__name__}({given})"
            self.program.lines.append(Line.of(text, [name, *changed], is_call=asks))
            self._names.bind_all(output, name)
            return output

    def cut_at_embedding(self, module: Any, tokens: Tensor, leaf: Tensor) -> None:
        """Tell that the graph of the last call was cut at the embedding of `tokens`."""
        with self._aside():
            line = next(line for line in reversed(self.program.lines) if line.is_call)
            output, *others = line.makes
            name = self._names.fresh("embedded")
            before, call = line.text.split(f"{output} = ", 1)
            call, *rest = call.split("\n")
            shown = f"{self._expression(module)}, {self._expression(tokens)}"
            cut = f"{before}{name}, {output} = at_embedding({shown}, lambda: {call})"
            self.program.lines.remove(line)
            self.program.lines.append(Line.of("\n".join([cut, *rest]), [name, output, *others], is_call=True))
            self._names.bind(leaf, name)

    def judge(self, kind: str, got: Any = None, expected: Any = None, unit: Any = 1.0, limit: float = 0.0) -> None:
        """Record the comparison that is about to be made; the last one before the violation counts."""
        if self._is_muted:
            return
        with self._aside():
            try:
                left, right = (self._expression(v) if v is not None else "" for v in (got, expected))
                size = self._expression(unit) if isinstance(unit, Tensor) else literal(unit)  # as it was measured
                self.program.judged = Judged(kind, left, right, size, limit)
            except UnwritableError:
                self.program.judged = None

    # what torch reports -----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._is_aside = self._is_aside, True
        try:
            return self._recorded(func, args, kwargs or {})
        finally:
            self._is_aside = outer

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            return iter(self._recorded(torch.Tensor.unbind, args, {}))
        leaves = list(_leaves((args, kwargs)))
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        depends = any(self._names.knows(v) and not self._names.is_given(v) for v in leaves)
        given = not depends and all(self._names.is_given(v) for v in tensors)
        if _is_in_place(name) and depends and self._names.is_given(args[0]):
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
        if changed or result is None or _is_in_place(name):
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
        self.program.lines.append(Line.of(text, makes))

    def _write_result(self, text: str, result: Any, generators: list[torch.Generator], given: bool) -> None:
        if isinstance(result, float | str):
            if not given:
                self._names.bind_all(result, text)
            return
        if not any(isinstance(v, Tensor) for v in _leaves((result,))) and not isinstance(result, list):
            return
        name = self._names.fresh("t")
        drawn = [self._names.expression(g) for g in generators]
        self.program.lines.append(Line.of(f"{name} = {text}", [name, *drawn]))
        self._names.bind_all(result, name, given=given)

    def _lose(self, result: Any, generators: list[torch.Generator], given: bool) -> None:
        """Leave a result without a name; one that is given is known by its numbers all the same."""
        for generator in generators:
            self._names.forget(generator)
        if given:
            for value in _leaves((result,)):
                if isinstance(value, Tensor) and not self._names.knows(value):
                    self._names.bind(value, "", given=True)

    # text -------------------------------------------------------------------------------------------------------

    def _expression(self, value: Any, *, drawn: bool = False) -> str:
        if isinstance(value, Caller):
            self.program.parts["forward"] = None
            given = ", ".join(self._names.expression(v) for v in (value.built.module, *value.args))
            return f"lambda: forward({given})" if value.args else f"lambda *args: forward({given}, *args)"
        if id(value) in self._parts:
            part = self._parts[id(value)]
            self.program.parts[part] = None
            return part
        return self._names.expression(value, drawn=drawn)

    def _calling(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return the call as an expression; the arguments lie as the path says."""
        if isinstance(function, nn.Module) and self._names.knows(function):
            called = self._names.expression(function)
        elif id(function) in self._parts:
            called = self._expression(function)
        elif self.path.compiled:
            called = "torch.compile(forward, dynamic=True)"
            args = (next(m for m in self._models.values()), *args)
        else:
            raise UnwritableError("a call of something else than the subject")
        if "forward" in called:
            self.program.parts["forward"] = None
        given = [self._placed(a) for a in args] + [f"{k}={self._expression(v)}" for k, v in kwargs.items()]
        return f"{called}({', '.join(given)})"

    def _placed(self, value: Any) -> str:
        shown = self._expression(value)
        if self.path.layout and isinstance(value, Tensor) and value.ndim >= 2:
            return f"laid_out({shown}, {self.path.layout!r})"
        return shown

    def _around(self, trained: nn.Module | None, text: str) -> str:
        """Put a call into the modes that hold while it runs."""
        contexts = []
        if torch.is_inference_mode_enabled():
            contexts.append("torch.inference_mode()")
        elif not torch.is_grad_enabled():
            contexts.append("torch.no_grad()")
        if self.path.backend != "default":
            contexts.append(f"backends[{self.path.backend!r}]()")
            self.program.parts["backends"] = None
        if torch.is_autocast_enabled("cpu"):
            contexts.append("torch.autocast('cpu', dtype=torch.bfloat16)")
        if torch.get_default_device().type == "meta":
            contexts.append("torch.device('meta')")
        if contexts:
            text = f"with {', '.join(contexts)}:\n" + "\n".join(f"    {line}" for line in text.split("\n"))
        if trained is not None and trained.training:
            model = self._names.expression(trained)
            return f"{model}.train()\n{text}\n{model}.eval()"
        return text

    def _name_model(self, module: Any, making: str) -> None:
        name = "model" if not self._models else f"model_{len(self._models) + 1}"
        self._models[name] = module
        with self._aside():
            self._names.bind_module(module, name)
        self.program.lines.append(Line.of(f"{name} = {making}", [name]))

    @contextmanager
    def _aside(self) -> Iterator[None]:
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


def _seeded(text: str, state: Tensor) -> str:
    """Put the seed before a call that may draw, if it is the first since the seed was set."""
    seed = torch.initial_seed()
    fresh = torch.equal(state, torch.Generator().manual_seed(seed).get_state())
    return f"torch.manual_seed({seed})\n{text}" if fresh else text


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name[2:3] == "i" and name[3:-2] in _CHANGING)
    return name.endswith("_")


def _leaves(value: Any) -> Iterator[Any]:
    """Go through what lies in lists, tuples and dicts."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value
