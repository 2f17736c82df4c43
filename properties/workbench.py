"""Everything known about one subject while it is checked: its models, its rounding noise, the settings."""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.compare import GAP, epsilon, size_of, worst_difference
from veriformer.properties.compiling import compiled as compile_call
from veriformer.properties.compiling import why_not_compiled
from veriformer.properties.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.narrowing import ChoiceWatch, NarrowingWatch
from veriformer.properties.noise import relative_tolerance, sensitivity
from veriformer.properties.pool import Built, ModelPool
from veriformer.properties.profiles import Settings
from veriformer.properties.subject import KINDS, DrawnConfig, Subject
from veriformer.properties.transcript import Recorder
from veriformer.properties.violations import SubjectError, SubjectTimeoutError


@dataclass
class Tally:
    """What one property saw.

    Attributes:
        examples: cases judged.
        witnesses: times the premise really held.
        error: worst error, in the unit of its tolerance.
        tolerance: tolerance at that place.
        margin: worst error / tolerance; a violation has more than 1.
        paths: times each path was walked.
        measures: what was measured beside, the largest of each.
        subject_seconds: spent inside the subject.
        calls: of the subject.
        given_up: reasons for which cases were given up before anything was compared.
    """

    examples: int = 0
    witnesses: int = 0
    error: float = 0.0
    tolerance: float = 0.0
    margin: float = 0.0
    paths: dict[str, int] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    subject_seconds: float = 0.0
    calls: int = 0
    given_up: set[str] = field(default_factory=set)

    def note(self, error: float, tolerance: float) -> None:
        """Keep the comparison if its margin is the worst so far."""
        margin = error / tolerance if tolerance > 0 else (0.0 if error == 0 else math.inf)
        if margin >= self.margin:
            self.error, self.tolerance, self.margin = error, tolerance, margin

    def note_worst_of(self, other: Tally) -> None:
        """Take over the worst comparison of another tally, and the time that it spent."""
        if other.margin >= self.margin:
            self.error, self.tolerance, self.margin = other.error, other.tolerance, other.margin
        self.subject_seconds += other.subject_seconds
        self.calls += other.calls


class Workbench:
    """One subject, ready to be judged."""

    def __init__(self, subject: Subject, settings: Settings, pool: ModelPool | None = None) -> None:
        self.subject = subject
        self.settings = settings
        self.device = torch.device(settings.device)
        self.pool = pool or ModelPool(subject, self.device)
        self.tally = Tally()
        self.recorder: Recorder | None = None
        self._tolerances: dict[tuple[DrawnConfig, torch.dtype], float] = {}
        self._dtypes: tuple[torch.dtype, ...] | None = None
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._training: dict[tuple[DrawnConfig, torch.dtype], bool] = {}
        self._chooses: dict[DrawnConfig, bool] = {}

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is among the paths: in the profile thorough, where a compiler is at hand."""
        return self.settings.profile == "thorough" and why_not_compiled(self.subject) is None

    @property
    def configs(self) -> list[DrawnConfig]:
        """Sizes that models are built with, smallest first."""
        return self.pool.configs

    def call(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the subject: timed, limited in time, its warnings kept quiet.

        Raises:
            SubjectError: it raised.
            SubjectTimeoutError: it took longer than `settings.call_seconds`.
        """
        if function is None:
            raise SubjectError("the subject does not offer what the property needs")
        started = time.perf_counter()
        try:
            aside = self.recorder.aside() if self.recorder else nullcontext()
            with aside, _time_limit(self.settings.call_seconds), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = function(*args, **kwargs)
        except (MemoryError, RecursionError) as problem:
            raise SubjectError(f"the subject raised {type(problem).__name__} ({_describe(args, kwargs)})") from problem
        except Exception as problem:
            line = (str(problem).strip() or "no message").splitlines()[0][:300]
            raise SubjectError(
                f"the subject raised {type(problem).__name__}: {line} ({_describe(args, kwargs)})"
            ) from problem
        finally:
            self.tally.subject_seconds += time.perf_counter() - started
            self.tally.calls += 1
        if function is not None:
            self._note_part(function)
        if self.recorder:
            self.recorder.called(function, args, kwargs, output)
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
            raise SubjectError(
                f"forward returned {_a(output)}, where one tensor is required; "
                "give the subject a forward that picks the tensor to be checked"
            )
        return output

    def warm(self, built: Built, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, without a limit of time: the compiler's seconds are not the subject's.

        Raises:
            SubjectError: it cannot be compiled.
        """
        assert self.subject.forward is not None
        run = self._compiled.setdefault(id(built.module), compile_call(self.subject.forward, built.module))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(*args, **kwargs)
        except Exception as problem:
            line = (str(problem).strip() or "no message").splitlines()[0][:300]
            raise SubjectError(f"compiled, the subject raised {type(problem).__name__}: {line}") from problem

    def half_tolerance(self, built: Built) -> float:
        """Return the tolerance under autocast, which computes parts in bfloat16 and others in float32.

        Which parts these are depends on the path (a kernel with or without a mask), so that a whole path is rounded
        otherwise, not single tensors: three times what the model shows in bfloat16, at most `GAP`.
        """
        try:
            return min(3 * self.tolerance(self.pool.get(built.config, torch.bfloat16)), GAP[torch.bfloat16])
        except SubjectError:
            return GAP[torch.bfloat16]

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes to judge in: those asked for, else float32 and, where it is genuine, float64."""
        if self.settings.dtypes:
            return self.settings.dtypes
        if self._dtypes is None:
            own = self.given_dtype()
            genuine = self._computes_in_float64()
            wide = (torch.float64,) if genuine else ()
            self._dtypes = (own, *wide) if own != torch.float64 else (own,)
        return self._dtypes

    def given_dtype(self) -> torch.dtype:
        """Return the parameter dtype of a ready-made instance, float32 for anything else."""
        module = self.subject.module
        parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
        return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)

    def tolerance(self, built: Built) -> float:
        """Return the largest relative difference between equivalent evaluations that counts as rounding."""
        key = (built.config, built.dtype)
        if key not in self._tolerances:
            c = built.config
            longest = max(c.d_model, c.d_ff, c.max_len, 16)
            floor = self._sensitivity(built, epsilon(built.dtype))
            self._tolerances[key] = relative_tolerance(floor, built.dtype, longest)
        return self._tolerances[key]

    def _sensitivity(self, built: Built, step: float) -> float:
        generator = torch.Generator().manual_seed(1)
        inputs = ordinary(self.subject, built.config, generator, built.dtype)
        tensors = [x.to(self.device) for x in inputs.tensors]

        def call(module: Any, moved: list[Tensor]) -> Tensor:
            stand_in = Built(module, built.config, built.dtype, built.is_fresh)
            return self.forward(stand_in, *moved, *inputs.extras)

        return sensitivity(built.module, call, tensors, built.dtype, generator, step)

    def _computes_in_float64(self) -> bool:
        """Probe: no operation gives narrower numbers, and the output follows a move of 1e-11."""
        if self.device.type == "mps" or not has_ordinary_inputs(self.subject.kind):
            return False
        try:
            built = self.pool.get(self.configs[0], torch.float64)
            inputs = ordinary(self.subject, built.config, torch.Generator().manual_seed(1), torch.float64)
            tensors = [x.to(self.device) for x in inputs.tensors]
            with NarrowingWatch() as watch, torch.no_grad():
                output = self.forward(built, *tensors, *inputs.extras)
                for backend in self.subject.backends.values():  # they must agree with the default one
                    with backend():
                        self.forward(built, *tensors, *inputs.extras)
            hidden = built.module.modules() if isinstance(built.module, torch.nn.Module) else ()
            if any(getattr(part, "is_narrow", False) for part in hidden):  # other frameworks, which torch cannot watch
                return False
            if watch.is_narrow or output.dtype != torch.float64 or not bool(output.isfinite().all()):
                return False
            floats = built.module is not None or any(x.is_floating_point() for x in inputs.tensors)
            step = 1e-11  # far below float32's 6e-8, far above float64's 1e-16
            moved = self._sensitivity(built, step)
        except SubjectError:
            return False
        return not floats or step * 1e-3 < moved < step * 1e3

    def makes_choices(self, built: Built) -> bool:
        """Whether the model picks by numbers that it computed (experts, keys): half precision flips such picks."""
        key = built.config
        if key not in self._chooses:
            inputs = ordinary(self.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
            try:
                with ChoiceWatch() as watch, torch.no_grad():
                    self.forward(built, *[x.to(self.device) for x in inputs.tensors], *inputs.extras)
                self._chooses[key] = watch.has_chosen
            except SubjectError:
                self._chooses[key] = False
        return self._chooses[key]

    def is_deterministic_in_training(self, built: Built) -> bool:
        """Whether train mode, without dropout, can be judged like eval mode: equal calls agree.

        On many copies of a batch: stochastic depth draws once a sample, and two samples would often agree by chance.
        """
        key = (built.config, built.dtype)
        if key not in self._training:
            inputs = ordinary(self.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
            copies = 64 if KINDS[self.subject.kind].inputs != "other" else 1
            tensors = [x.repeat(copies, *(1,) * (x.ndim - 1)).to(self.device) for x in inputs.tensors]
            if not isinstance(built.module, torch.nn.Module):
                return False
            built.module.train()
            try:
                self._training[key] = self.repeats_itself(built, *tensors, *inputs.extras)
            except SubjectError:
                self._training[key] = False
            finally:
                built.module.eval()
        return self._training[key]

    def repeats_itself(self, built: Built, *tensors: Any, **kwargs: Any) -> bool:
        """Whether two equal calls give the same output within rounding."""
        first, second = (self.forward(built, *tensors, **kwargs) for _ in range(2))
        return worst_difference(first, second, size_of(second)).error <= 16 * epsilon(first.dtype)


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}" if value is not None else "None"


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    shapes = [f"{list(a.shape)} {str(a.dtype).removeprefix('torch.')}" for a in args if isinstance(a, Tensor)]
    shapes += [f"{k}={list(v.shape)}" for k, v in kwargs.items() if isinstance(v, Tensor)]
    return "called with " + ", ".join(shapes) if shapes else "called without tensors"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise SubjectTimeoutError when the block runs longer; needs the main thread of a Unix process, else no limit.

    A hang inside a C extension is not interrupted by this; the command line runs subjects in processes for that.
    """
    if seconds <= 0 or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise SubjectTimeoutError(f"one call of the subject took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.perf_counter()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            left = max(remaining - (time.perf_counter() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
