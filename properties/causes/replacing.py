"""At which line two runs on sequences of different lengths part, confirmed by putting the one's numbers into the other.

A line is named only if the longer run becomes right where that line is given what it gives in the shorter one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.causes.tracing.lines import SILENT, Step, Trace, line_of_code, tensors_of

Run = Callable[[], Tensor]

_MOST = 12  # lines that are tried


@dataclass(frozen=True)
class Within:
    """A short sequence as a part of a longer one.

    Attributes:
        short: length of the one.
        long: length of the other.
        start: where the short one begins in it.
    """

    short: int
    long: int
    start: int

    def cut(self, x: Tensor) -> Tensor:
        """Return a tensor with every axis of the longer length cut to the part: a view."""
        for axis, size in enumerate(x.shape):
            if size == self.long:
                x = x.narrow(axis, self.start, self.short)
        return x


@dataclass
class Replaced:
    """A line behind which the runs part, and which alone makes the difference.

    Attributes:
        short: the step of the shorter run.
        long: the same step of the longer one.
    """

    short: Step
    long: Step


def line_that_parts(
    short: Callable[[], Run],
    long: Callable[[], Run],
    within: Within,
    agrees: Callable[[Tensor, Tensor], bool],
    limit: float,
) -> Replaced | None:
    """Find the one line that gives the longer run other numbers from right ones, and that is all that is wrong.

    Args:
        short: makes the one run ready.
        long: the other.
        within: how their lengths belong together.
        agrees: whether the output of the longer run is the shorter one's.
        limit: largest difference that is rounding, relative to the size of a tensor.
    """
    run = short()
    with torch.no_grad(), Trace() as trace:
        wanted = run()
    tried: set[tuple[str, str, int]] = set()
    watch = _Against(trace.steps, within, limit)
    run = long()
    with torch.no_grad(), watch:
        run()
    for one, two in watch.entries:
        key = _key(two)
        if key in tried or len(tried) >= _MOST or not two.file:
            continue
        tried.add(key)
        run = long()
        try:
            with torch.no_grad(), _Against(trace.steps, within, limit, key):
                got = run()
        except (RuntimeError, ValueError, IndexError):  # the numbers of the other do not do here
            continue
        if agrees(got, wanted):
            return Replaced(one, two)
    return None


def _key(step: Step) -> tuple[str, str, int]:
    return step.name, step.file, step.number


@dataclass
class _Against(TorchFunctionMode):
    """Holds each call of a torch function against the same one of another run.

    Attributes:
        steps: of that run.
        within: how the lengths belong together.
        limit: largest difference that is rounding.
        replaced: the line whose outputs, where they part from right inputs, are replaced by those of the other run.
        entries: the steps that part from inputs that agree.
    """

    steps: list[Step]
    within: Within
    limit: float
    replaced: tuple[str, str, int] | None = None
    entries: list[tuple[Step, Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._next = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in SILENT or self._next >= len(self.steps):
            return func(*args, **(kwargs or {}))
        inputs = [x.detach().clone() for x in tensors_of((args, kwargs or {}))]
        output = func(*args, **(kwargs or {}))
        outputs = list(tensors_of(output))
        if not outputs:
            return output
        file, number = line_of_code()
        other = self.steps[self._next]
        self._next += 1
        if (name, file, number) != _key(other):
            self._next = len(self.steps)  # they take different ways
            return output
        given = [x.detach().clone() for x in outputs]
        if not self._same(other.inputs, inputs) or self._same(other.outputs, given):
            return output
        step = Step(name, file, number, inputs, given)
        self.entries.append((other, step))
        if self.replaced != _key(step):
            return output
        if name.endswith("_") or not isinstance(output, Tensor):
            for x, right in zip(outputs, other.outputs, strict=True):
                self._put(x, right)
            return output
        changed = output.clone()
        self._put(changed, other.outputs[0])
        return changed

    def _put(self, x: Tensor, right: Tensor) -> None:
        part = x if x.shape == right.shape else self.within.cut(x)
        if part.shape == right.shape:
            part.copy_(right)

    def _same(self, short: list[Tensor], long: list[Tensor]) -> bool:
        if len(short) != len(long):
            return False
        return all(
            agree(a, b if b.shape == a.shape else self.within.cut(b), self.limit)
            for a, b in zip(short, long, strict=True)
        )


def agree(a: Tensor, b: Tensor, limit: float) -> bool:
    """Return whether two tensors agree, as far as they can be held against each other."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
        return True
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    return float((a - b).abs().max()) <= limit * max(float(a.abs().max()), 1e-300)
