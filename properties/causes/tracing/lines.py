"""On which line of the subject's own code two runs part that must agree, and what a softmax there is given."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.subject.sizes import DrawnConfig

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_ENGINE = tuple(str(Path(__file__).parent.parent / room) for room in ("engine", "judging", "bench"))
"""What calls a subject: whoever called that is none of the subject's."""
_LIBRARY = ("contextlib.py", "functools.py")
_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
_CAPS = 200.0
"""Soft caps of scores are smaller, and what stands for -inf is larger."""
_FAR = 1e3
"""Below all others: no score of a model lies there, and what a mask puts in its place does."""
SILENT = ("__get__", "size", "dim", "__len__", "stride", "is_contiguous", "numel")


@dataclass(frozen=True)
class Kept:
    """What two runs must agree on: places along axes of certain sizes.

    Attributes:
        axes: `{size: places}`; every axis of such a size is cut to these places.
    """

    axes: dict[int, list[int]]

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the part of a tensor that must agree; None if no axis of it is one of these."""
        cut = False
        for axis, size in enumerate(x.shape):
            if size in self.axes:
                x = x.index_select(axis, torch.tensor(self.axes[size], device=x.device))
                cut = True
        return x if cut else None


def apart(length: int, config: DrawnConfig) -> int:
    """Return a length, this one or more, that no size of a model coincides with."""
    sizes = {config.d_model, config.num_heads, config.d_head, config.d_ff, config.vocab_size, config.num_layers}
    return next(n for n in range(length, length + 20) if n not in sizes and n % 2)


@dataclass
class Step:
    """One call of a torch function.

    Attributes:
        name: of the function.
        file: of the code that calls it.
        number: of the line.
        inputs: copies of the tensors that it was given; parameters, which no call changes, as they are.
        outputs: of those that it gave.
    """

    name: str
    file: str
    number: int
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Trace(TorchFunctionMode):
    """Notes every call of a torch function, with the line of code that it stands on."""

    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in SILENT or len(self.steps) > 5000:
            return func(*args, **(kwargs or {}))
        given = tensors_of((args, kwargs or {}))
        inputs = [x.detach() if isinstance(x, nn.Parameter) else x.detach().clone() for x in given]
        output = func(*args, **(kwargs or {}))
        outputs = [x.detach().clone() for x in tensors_of(output)]
        if outputs:
            file, number = line_of_code()
            self.steps.append(Step(name, file, number, inputs, outputs))
        return output


def line_where_runs_part(first: Callable[[], object], second: Callable[[], object], kept: Kept, limit: float) -> str:
    """Return the line of code at which two runs part on what they must agree on, with its text; "" if none is found.

    Args:
        first: one run.
        second: another.
        kept: what must agree, of the inputs and outputs of every torch function.
        limit: largest difference that is rounding, relative to the size of a tensor.

    Returns:
        `gpt.py:41: weights = scores.softmax(-1)`, and what a softmax there is given at places that are not kept.
    """
    runs = []
    for run in (first, second):
        with torch.no_grad(), Trace() as trace:
            run()
        runs.append(trace.steps)
    for number, (one, two) in enumerate(zip(*runs, strict=False)):
        if (one.name, one.file, one.number) != (two.name, two.file, two.number):
            return ""  # they take different ways
        if all(_agree(a, b, kept, limit) for a, b in zip(one.outputs, two.outputs, strict=False)):
            continue
        known = all(kept(x) is not None or torch.equal(x, y) for x, y in zip(one.inputs, two.inputs, strict=False))
        if not known or not all(_agree(a, b, kept, limit) for a, b in zip(one.inputs, two.inputs, strict=False)):
            return ""  # it came in through a tensor of another form
        softmax = _softmax_of(one, runs[0][:number], kept)
        return told(softmax) + _given(softmax, kept) if softmax else told(one)
    return ""


def told(step: Step) -> str:
    """Return the line that a step stands on, with its text."""
    text = text_of(step.file, step.number)
    return f"{Path(step.file).name}:{step.number}: `{text}`" if text else ""


def text_of(file: str, number: int) -> str:
    """Return the text of a line of code."""
    return linecache.getline(file, number).strip()


def _softmax_of(step: Step, before: list[Step], kept: Kept) -> Step | None:
    """Return the softmax that a step is, or whose weights it takes, where these are on places that are not kept."""
    if step.name == "softmax":
        return step
    if step.name not in _PRODUCTS or not step.inputs:
        return None
    weights = step.inputs[0]
    if weights.ndim < 2 or weights.shape[-1] not in kept.axes or weights.shape[-2] not in kept.axes:
        return None
    made = (s for s in reversed(before) if s.name == "softmax" and s.outputs[0].shape[-2:] == weights.shape[-2:])
    return next(made, None)


def _given(step: Step, kept: Kept) -> str:
    """Say what a softmax is given for the keys that it is not to see."""
    if not step.inputs:
        return ""
    scores = step.inputs[0].double()
    size = scores.shape[-1]
    if size not in kept.axes or scores.ndim < 2:
        return ""
    places = torch.tensor(kept.axes[size])
    hidden = torch.ones(size, dtype=torch.bool)
    hidden[places] = False
    rows = scores
    if scores.shape[-2] in kept.axes:
        rows = scores.index_select(-2, torch.tensor(kept.axes[scores.shape[-2]]))
    given, shown = rows[..., hidden], rows[..., ~hidden]
    if not given.numel():
        return ""
    low, high = float(given.min()), float(given.max())
    if high == -torch.inf:
        return ""
    if high - low < 1e-6 * max(1.0, abs(high)):
        capped = ": what a soft cap makes of it where it acts behind the mask" if -_CAPS < high < 0 else ""
        return f", where the scores of hidden keys are {high:.4g}, not -inf{capped}"
    if float(shown.max()) == -torch.inf or float(shown.max()) < low - _FAR:
        return ", where it is the keys that may be seen whose scores are lowered: the mask is inverted"
    if high < float(shown.min()) - 1:
        return f", where the scores of hidden keys are lowered to {low:.4g} to {high:.4g}, not to -inf"
    return ", where the scores of hidden keys are as they were: no mask has reached them"


def _agree(a: Tensor, b: Tensor, kept: Kept, limit: float) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return True
    left, right = kept(a), kept(b)
    if left is None or right is None or not left.numel():
        return True
    both = left.isfinite() & right.isfinite()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return False
    if not bool(both.any()):
        return True
    return bool(worst_difference(left[both], right[both], size_of(right[both])).error <= limit)


def tensors_of(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in what a function was given or gave."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item, depth - 1)
    elif depth and isinstance(value, dict):
        yield from tensors_of(list(value.values()), depth - 1)


def line_of_code() -> tuple[str, int]:
    """Return the innermost line of a subject, neither torch's nor ours; ("", 0) where torch itself is judged, say."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_ENGINE):
        file = frame.f_code.co_filename
        is_other = file.startswith((*_OURS, "<")) or file.endswith(_LIBRARY) or "/einops/" in file
        if not is_other:
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0
