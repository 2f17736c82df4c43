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
from torch.overrides import TorchFunctionMode

from veriformer.properties.bench.pool import WEIGHT_SEED, Built
from veriformer.properties.counterexamples.literals import literal
from veriformer.properties.counterexamples.modes import in_modes, left, seeded
from veriformer.properties.counterexamples.names import SMALL, Names, one_of_its_own
from veriformer.properties.counterexamples.program import MADE, MODULE, Judged, Line, Program, UnwritableError
from veriformer.properties.counterexamples.source import cast_of
from veriformer.properties.counterexamples.tracing import Tracing
from veriformer.properties.engine.calling import Caller
from veriformer.properties.subject.paths import DEFAULT, Path
from veriformer.properties.subject.subject import Subject

PARTS = (
    "build", "forward", "weights", "embed", "cache", "generate", "sampling", "projections", "patches", "router", "loss",
    "accumulate", "decode", "train", "words", "vocabulary", "merges", "scores",
)  # fmt: skip
"""Callables of a subject."""


class Recorder(TorchFunctionMode):
    """Records while it is entered; steps aside while the subject itself runs.

    Args:
        subject: that is judged.
        device: where its models are.
        small: most numbers of an input that is shown with them, and not drawn again.

    Attributes:
        program: so far.
        path: how the subject is called next.
    """

    def __init__(self, subject: Subject, device: torch.device, small: int = SMALL) -> None:
        super().__init__()
        self.program = Program()
        self.path: Path = DEFAULT
        self._subject = subject
        self._device = device
        self._parts = {id(part): name for name in PARTS if (part := getattr(subject, name)) is not None}
        self._names = Names(self.program, small)
        self._tracing = Tracing(self.program, self._names, self._expression)
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
            seed = "" if built.seed == WEIGHT_SEED else f", seed={built.seed}"
            dtype = None if built.is_as_built else built.dtype
            making = f"{MADE}({self._names.expression(built.config)}, {dtype}{raw}{where}{seed})"
        elif built.module is self._subject.module:
            making = f"{MODULE}.eval()" if isinstance(built.module, nn.Module) else MODULE
        else:
            making = f"copy.deepcopy({MODULE}).to('{self._device}'){cast_of([built.module], str(built.dtype))}.eval()"
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
            path, self.path = self.path, DEFAULT
            output = run()
            if text is None:
                return output
            draws = not torch.equal(before, torch.get_rng_state())
            output = one_of_its_own(output)
            name = self._names.fresh("y" if isinstance(output, Tensor) else "parts")
            trained = next((self._expression(a) for a in (function, *args) if getattr(a, "training", False)), "")
            draws = draws or bool(trained)
            text = seeded(f"{name} = {text}", before) if draws else f"{name} = {text}"
            makes = [name]
            for value, version in zip(tensors, versions, strict=True):
                if value._version != version:
                    self._names.changed(value, version)
                    makes += self._names.sharing(value)
            self.program.lines.append(Line.of(in_modes(text, path, trained), makes, is_call=True))
            if isinstance(output, nn.Module):
                self._names.bind_module(output, name)
            self._names.bind_all(output, name)
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
                sides = [self._expression(v) if v is not None else "" for v in (got, expected)]
                size = self._expression(unit) if isinstance(unit, Tensor) else literal(unit)  # as it was measured
                self.program.judged = Judged(kind, sides[0], sides[1], size, limit)
            except UnwritableError:
                self.program.judged = None

    # what torch reports -----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._is_aside = self._is_aside, True
        try:
            return self._tracing.run(func, args, kwargs or {})
        finally:
            self._is_aside = outer

    # text -------------------------------------------------------------------------------------------------------

    def _expression(self, value: Any, *, drawn: bool = False) -> str:
        if isinstance(value, Caller):
            self.program.parts[value.part] = None
            given = ", ".join(self._names.expression(v) for v in (value.built.module, *value.args))
            return f"lambda: {value.part}({given})" if value.args else f"lambda *args: {value.part}({given}, *args)"
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
        if self.path.backend != "default":
            self.program.parts["backends"] = None
        given = [self._placed(a) for a in args] + [f"{k}={self._expression(v)}" for k, v in kwargs.items()]
        return f"{called}({', '.join(given)})"

    def _placed(self, value: Any) -> str:
        shown = self._expression(value)
        if self.path.layout and isinstance(value, Tensor) and value.ndim >= 2:
            return f"laid_out({shown}, {self.path.layout!r})"
        return shown

    def _name_model(self, module: Any, making: str) -> None:
        name = "model" if not self._models else f"model_{len(self._models) + 1}"
        self._models[name] = module
        self.program.models.append(module)
        with self._aside():
            self._names.bind_module(module, name)
        self.program.lines.append(Line.of(f"{name} = {making}", [name]))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Step aside while the subject runs, or while this recorder itself calls torch."""
        if self._is_aside:  # torch has already taken the mode off while it reports to us
            yield
            return
        self._is_aside = True
        try:
            with left(self):
                yield
        finally:
            self._is_aside = False
