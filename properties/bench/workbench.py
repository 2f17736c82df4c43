"""One subject while it is checked: its models, the way it is called, what was measured on it, the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.compiling import compiled as compile_call
from veriformer.properties.bench.compiling import why_not_compiled
from veriformer.properties.bench.guards import SizesRefusedError, SubjectError, WrongOutputError, guarded, limited
from veriformer.properties.bench.pool import Built, ModelPool, duplicate
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.recording import Recording
from veriformer.properties.bench.tally import Tally
from veriformer.properties.subject.raised import told
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


class Workbench:
    """One subject, ready to be judged.

    Attributes:
        subject: with the facts that were found out.
        settings: of the run.
        device: of its models and inputs.
        pool: its models.
        tally: of the property that is judged now.
        measured: what `bench.measured` found out, kept.
    """

    def __init__(self, subject: Subject, settings: Settings, pool: ModelPool | None = None) -> None:
        self.subject = subject
        self.settings = settings
        self.device = torch.device(settings.device)
        self.pool = pool or ModelPool(subject, self.device, settings.call_seconds)
        self.tally = Tally()
        self._recorder: Recording | None = None
        self.measured: dict[tuple[Any, ...], Any] = {}
        self._compiled: dict[int, Callable[..., Any]] = {}

    @property
    def recorder(self) -> Recording | None:
        """Told of models, calls and comparisons, while a failing case is written down."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recording | None) -> None:
        self._recorder = recorder
        self.pool.told = recorder.know_model if recorder else None

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is among the paths: in the profile thorough, where a compiler is at hand."""
        return self.settings.profile == "thorough" and why_not_compiled(self.subject) is None

    @property
    def spares_float64(self) -> bool:
        """Whether a copy in float64 is made only where float32 cannot tell: it takes twice the room and the time."""
        return self.pool.is_large and not self.settings.dtypes

    @property
    def configs(self) -> list[DrawnConfig]:
        """Sizes that models are built with, smallest first."""
        return self.pool.configs

    def buildable(self) -> list[DrawnConfig]:
        """Return those of `configs` that `build` does not refuse."""
        found = []
        for config in self.configs:
            try:
                self.pool.get(config, torch.float32)
            except SizesRefusedError:
                continue
            found.append(config)
        return found

    def call(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the subject: timed, limited in time, its warnings kept quiet.

        A model that it leaves in train mode, as many a generation does at its end, is put back.

        Raises:
            SubjectError: it raised.
            SubjectTimeoutError: it took longer than `settings.call_seconds`.
        """
        if function is None:
            raise SubjectError("the subject does not offer what the property needs")
        modes = _modes(args[0]) if args and isinstance(args[0], nn.Module) else []
        try:
            if self.recorder:
                return self.recorder.call(function, args, kwargs, lambda: self._timed(function, args, kwargs))
            return self._timed(function, args, kwargs)
        finally:
            for part, training in modes:
                if part.training != training:
                    part.training = training

    def _timed(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started = perf_counter()
        try:
            output = guarded(function, args, kwargs, self.settings.call_seconds)
        finally:
            self.tally.subject_seconds += perf_counter() - started
            self.tally.calls += 1
        self._note_part(function)
        return output

    def _note_part(self, function: Callable[..., Any]) -> None:
        """Count a call of another part than `forward` as a path walked."""
        for part in ("weights", "cache", "embed", "generate"):
            if getattr(self.subject, part) is function:
                self.tally.paths[part] = self.tally.paths.get(part, 0) + 1

    def forward(self, built: Built, *args: Any, compiled: bool = False, **kwargs: Any) -> Tensor:
        """Call the subject's forward and insist on one tensor.

        Args:
            built: the model.
            args: after it.
            compiled: through torch.compile.
            kwargs: keywords.

        Raises:
            SubjectError: it raised, or returned something else than a tensor.
        """
        function = self.subject.forward or built.module
        arguments = (built.module, *args) if self.subject.forward is not None else args
        if compiled and self.subject.forward is not None:
            self.warm(built, *args, **kwargs)
            function = self._compiled[id(built.module)]
            arguments = args
        output = self.call(function, *arguments, **kwargs)
        if not isinstance(output, Tensor):
            raise WrongOutputError(
                f"forward returned {_a(output)}, where one tensor is required; "
                "give the subject a forward that picks the tensor to be checked"
            )
        if output.layout != torch.strided or output.is_meta:
            odd = "on device meta, without values" if output.is_meta else str(output.layout).removeprefix("torch.")
            raise WrongOutputError(
                f"forward returned a tensor that is {odd}, where one of numbers in memory is required"
            )
        return output

    @contextmanager
    def trying(self, built: Built) -> Iterator[Built]:
        """Give a model, and draw its inputs, where it may be called with what it should refuse: on the CPU.

        There an index out of bounds is an exception; on a GPU it is the end of every later call of the process.
        """
        if self.device.type == "cpu":
            yield built
            return
        device, self.device = self.device, torch.device("cpu")
        module = built.module
        try:
            yield replace(built, module=duplicate(module).cpu() if isinstance(module, nn.Module) else module)
        finally:
            self.device = device

    def warm(self, built: Built, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, without a limit of time: the compiler's seconds are not the subject's.

        Raises:
            SubjectError: it cannot be compiled.
        """
        assert self.subject.forward is not None
        run = self._compiled.setdefault(id(built.module), compile_call(self.subject.forward, built.module))
        try:
            limited(run, args, kwargs, 0)
        except Exception as problem:
            raise SubjectError(f"compiled, the subject raised {told(problem)}") from problem


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}" if value is not None else "None"


def _modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each part with its mode: done at every call, where `modules` builds a name for each part."""
    found, waiting = {id(model): model}, [model]
    for part in waiting:
        for child in part._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return [(part, part.training) for part in waiting]
