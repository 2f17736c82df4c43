"""Calls that do not repeat themselves: whatever a property compares then differs for that reason alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from os.path import basename
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.constructing.uninitialised import Filled
from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built, duplicate
from veriformer.properties.causes.asking import measured_once
from veriformer.properties.causes.tracing.lines import line_of_code, text_of
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.probes.dropping.dropouts import DropoutWatch
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.layouts import LAYOUTS
from veriformer.properties.subject.paths import Path

UNSTEADY = (
    "attention.", "batch.", "causality.", "cross_attention.", "dropout.eval-deterministic", "dropout.mode-cycle",
    "ffn.", "layer.", "norm.", "numerics.", "padding.", "permutation.", "positions.", "residual.", "rotary.",
)  # fmt: skip
"""Families that compare outputs in eval mode."""
NOISY = (
    "anatomy.", "decoding.", "embedding.", "gradients.", "instances.", "learned.", "loss.of-model",
    "parameters.registered", "router.", "twin.",
)  # fmt: skip
"""What compares in eval mode too: noise makes it fail; what a call keeps or writes has other signs there."""

READS = "what torch.empty or empty_like gave is read, or added to, before anything is written there"
_MODES = ("grad", "no_grad")
_ARGUMENTS = {
    "attention": ("the queries", "the keys", "the values"),
    "cross_attention": ("its input", "the memory"),
    "encoder_decoder": ("the source", "the target"),
}
"""What the arguments of a kind are called, where there are several."""


def unsteady_opinion(case: Case, problem: Violation) -> str | None:
    """Say that a call changes its arguments, never gives the same twice, remembers, or reads a view as contiguous."""
    if not has_ordinary_inputs(case.subject.kind):
        return None
    calls = _Calls(case)
    name = ("unsteady", case.config(), calls.built.dtype)
    return measured_once(case, name, lambda: next(_told(calls), None)) or _by_layout(calls, problem)


def noise_opinion(case: Case, problem: Violation) -> str | None:
    """Say that a call never gives the same twice."""
    if not has_ordinary_inputs(case.subject.kind):
        return None
    calls = _Calls(case)
    name = ("noise", case.config(), calls.built.dtype)
    return measured_once(case, name, lambda: next(_told(calls, (_random,)), None))


class _Calls:
    """The subject on fixed inputs, and on others of the same shapes."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.built = case.built()
        self.inputs, self.others, self.extras = self._drawn(0)[0], self._drawn(1)[0], self._drawn(0)[1]
        self.limit = 1e-9 if self.built.dtype == torch.float64 else 1e-4  # the measured noise would hold the cause

    def _drawn(self, seed: int) -> tuple[list[Tensor], tuple[object, ...]]:
        generator = torch.Generator().manual_seed(seed)
        found = ordinary(self.case.subject, self.built.config, generator, self.built.dtype)
        return [x.to(self.case.bench.device) for x in found.tensors], found.extras

    def __call__(self, given: list[Tensor], path: Path, built: Built | None = None) -> Tensor:
        """Return the output for copies of these inputs."""
        return self.raw([x.clone() for x in given], path, built)

    def raw(self, given: list[Tensor], path: Path, built: Built | None = None) -> Tensor:
        """Return the output for these very tensors."""
        return self.case.call(built or self.built, *given, *self.extras, path=path).detach().clone()

    def name(self, number: int) -> str:
        """Return what an argument is called."""
        names = _ARGUMENTS.get(self.case.subject.kind, ())
        return names[number] if number < len(names) else "its input" if not number else f"argument {number}"

    def differ(self, one: Tensor, two: Tensor) -> bool:
        """Return whether two outputs differ beyond rounding."""
        if one.shape != two.shape or not one.is_floating_point():
            return not torch.equal(one, two)
        if torch.equal(one.isfinite(), two.isfinite()):  # NaN in both is no difference
            one, two = (x.nan_to_num(0, 0, 0) for x in (one, two))
        return worst_difference(one, two, size_of(two)).error > self.limit


def _told(calls: _Calls, measures: tuple[Callable[[_Calls, Path], str | None], ...] = ()) -> Iterator[str]:
    for mode in _MODES:
        for measure in measures or (_written, _random, _remembered):
            try:
                if told := measure(calls, Path(mode=mode)):
                    yield told + ("" if mode == "grad" else ", where no gradient is recorded")
            except SubjectError:
                continue


def _written(calls: _Calls, path: Path) -> str | None:
    given = [x.clone() for x in calls.inputs]
    calls.raw(given, path)
    changed = [i for i, (x, was) in enumerate(zip(given, calls.inputs, strict=True)) if not torch.equal(x, was)]
    return f"the call changes {calls.name(changed[0])} in place" if changed else None


class DropoutLines(DropoutWatch):
    """Notes as well where a function drops that is not told the mode of its module.

    Attributes:
        lines: where it is called, and whether it is told anything; None of a module, which is in train mode then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[str, int], bool | None] = {}
        self.flags: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, given = len(self.seen), kwargs or {}
        made = super().__torch_function__(func, types, args, given)
        if len(self.seen) > before and func is not nn.functional.scaled_dot_product_attention:
            at = line_of_code()
            if at[0]:
                behind = text_of(*at).rpartition("dropout")[2]
                self.lines[at] = None if _is_of_a_module() else "training" in behind or "True" in behind
                self.flags |= _flags_of_callers()
        return made

    def told(self) -> str:
        """Say at which rate dropout acts in eval mode, and at which line what it is told."""
        rate = f"dropout acts in eval mode, at a rate of {max(self.seen):g}"
        if len(self.lines) != 1:
            return rate
        ((file, number), is_told) = next(iter(self.lines.items()))
        line = f"`{text_of(file, number)}` ({basename(file)}, line {number})"
        if is_told is None:
            return f"{rate}: {line}, a module that eval() does not reach, or that is put back into train mode"
        flag = next((n for n in re.findall(r"self\.(\w+)", text_of(file, number)) if n in self.flags), "")
        if is_told and flag:
            return (
                f"{rate}: {line} is told by self.{flag}, a plain attribute that was set when the module was built (in "
                "train mode): eval() does not change it"
            )
        return (
            f"{rate}: {line} is told to, whatever the mode"
            if is_told
            else f"{rate}: {line} is not told self.training, and its default is to drop"
        )


def _flags_of_callers() -> set[str]:
    """Return the names of the yes-or-no attributes, but for the mode itself, of the modules that call."""
    found = set[str]()
    frame: Any = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found |= {name for name, value in vars(owner).items() if isinstance(value, bool) and name != "training"}
        frame = frame.f_back
    return found


def _is_of_a_module() -> bool:
    """Whether torch's own module of dropout is among those who called."""
    frame = sys._getframe(2)
    for _ in range(12):
        if frame is None or frame.f_code.co_filename.endswith("modules/dropout.py"):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.endswith("modules/dropout.py")


def _random(calls: _Calls, path: Path) -> str | None:
    calls(calls.inputs, path)
    with DropoutLines() as watch:
        first, second = calls(calls.inputs, path), calls(calls.inputs, path)
    if not calls.differ(first, second) or not bool(first.isfinite().all()):  # NaN is no number, and differs from itself
        return None
    if watch.seen:
        return watch.told()
    if bool(reads_memory(lambda: calls(calls.inputs, path))):
        return READS
    if calls.differ(calls(calls.inputs, path), second):
        return "the same call gives another output each time in eval mode: noise is not switched off"
    return None


def _remembered(calls: _Calls, path: Path) -> str | None:
    """Tell what an instance keeps: each argument is exchanged alone, and held against a copy that was never called."""
    module = calls.built.module
    if not isinstance(module, nn.Module):
        return None

    def copied() -> Built:
        if calls.case.subject.build is None:
            return replace(calls.built, module=duplicate(module))
        return calls.case.bench.pool.fresh(calls.built.config, calls.built.dtype)

    fresh = calls(calls.others, path, copied())
    for number in range(len(calls.inputs)):
        first = [*calls.others]
        first[number] = calls.inputs[number]
        used = copied()
        before = calls(first, path, used)
        after = calls(calls.others, path, used)
        if calls.differ(after, fresh):
            if bool(reads_memory(lambda: calls(calls.others, path))):
                return READS  # and memory held what the call before had left there
            same = not calls.differ(after, before)
            if same:
                return f"what an earlier call made of {calls.name(number)} is used again for others of the same shape"
            return (
                f"an earlier call, with other numbers for {calls.name(number)}, changes the output: something is kept"
            )
    return None


def _by_layout(calls: _Calls, problem: Violation) -> str | None:
    layout = next((name for name in LAYOUTS if problem.path.endswith(f" {name}")), "")
    if layout in ("", "expanded"):
        return None
    try:
        if calls.differ(calls(calls.inputs, Path(layout=layout)), calls(calls.inputs, Path())):
            return (
                f"right for contiguous inputs, wrong for the same numbers in another memory layout ({layout}): "
                "the strides are ignored, memory is read as if it were contiguous"
            )
    except SubjectError:
        pass
    return None


def reads_memory(call: Callable[[], Tensor]) -> Tensor:
    """Return whether a call gives another output where memory that is asked for without a value holds other numbers.

    Noise is none: with the same numbers there the output is the same.
    """
    given = []
    for value in (0.0, 0.0, 1.0):
        with Filled(value):
            given.append(call().detach().nan_to_num())
    if any(one.shape != given[0].shape for one in given):
        return torch.tensor(False)
    apart, size = [(one - given[0]).abs().amax() for one in given[1:]], given[0].abs().amax()
    return (apart[0] <= 1e-6 * size) & (apart[1] > 1e-3 * size)
