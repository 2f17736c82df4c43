"""Which line of a subject's own code gives an output what it must not have, in whatever layout its tensors are.

Every number on the way is held to two sets: the inputs that it depends on (found by replacing one after another) and
the outputs that depend on it (found by a backward of each). A number that is read by outputs alone which must not
depend on one of its inputs shows where things went wrong, in blocks, tiles, rolled and merged axes alike, since no axis
has to be known but those of the input and the output. Numbers of several inputs before it, which an output reads that
must not, may have been where they first did: then the line is one that they went wrong at the latest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from veriformer.properties.causes.tracing.lines import SILENT, line_of_code, tensors_of, text_of

Run = Callable[[Tensor], object]

SORTS = ("sort", "argsort")
MOST_STEPS = 400
MOST_NUMBERS = 100_000


@dataclass(frozen=True)
class Crossing:
    """Where what must not be mixed lies in inputs and outputs.

    Attributes:
        axis: of the input and the output: 0 samples, 1 positions.
        forbidden: `[inputs, outputs]`, bool: which output must not depend on which input.
        words: of one place, `position` or `sample`.
    """

    axis: int
    forbidden: Tensor
    words: str


@dataclass
class _Noted:
    name: str
    file: str
    number: int
    outputs: list[Tensor]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.name, self.file, self.number


@dataclass
class _Notes(TorchFunctionMode):
    """Keeps what every torch function gave: as it is, for backwards, or a copy."""

    copied: bool
    steps: list[_Noted] = field(default_factory=list)
    sorts: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in SORTS:
            self.sorts.append(line_of_code())
        if name not in SILENT and len(self.steps) < MOST_STEPS:
            found = [x for x in tensors_of(output) if x.is_floating_point() and x.numel() <= MOST_NUMBERS]
            if found:
                outputs = [x.detach().clone() for x in found] if self.copied else found
                self.steps.append(_Noted(name, *line_of_code(), outputs))
        return output


def line_that_crosses(run: Run, x: Tensor, other: Tensor, crossing: Crossing, limit: float) -> str | None:
    """Return the first line whose numbers go from inputs to outputs that must not have them, with what they are.

    Args:
        run: of a module or a subject, of its one input; the first tensor that it gives is its output.
        x: the input.
        other: another of its shape, from which single places are taken.
        crossing: what must not reach what.
        limit: largest difference that is rounding, relative to the size of a tensor.

    Returns:
        `gpt.py:41: `blocks.roll(1, dims=2)`: what comes from positions 8 to 11 goes to outputs 0 to 3 alone`, behind
        `the latest at` where what is mixed before it leaves that open.
    """
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    with torch.enable_grad(), _Notes(copied=False) as notes:
        given = run(leaf)
    output = next(tensors_of(given), None)
    axis, forbidden = crossing.axis, crossing.forbidden
    if output is None or not output.requires_grad or output.ndim <= axis or output.shape[axis] != forbidden.shape[1]:
        return None
    reached = list(_reached(output, notes.steps, axis))
    depends = list(_depends(run, x, other, notes.steps, axis, limit))
    if not depends:
        return None
    mixed, whole = False, ""
    for number, step in enumerate(notes.steps):
        for which in range(len(step.outputs)):
            to = torch.stack([r[number][which] for r in reached])  # [outputs, numbers]
            of = torch.stack([d[number][which] for d in depends])  # [inputs, numbers]
            bad = (forbidden.double().T @ of.double()) > 0  # an output that must not have it
            wrong = to.any(0) & (bad | ~to).all(0)
            if step.file and bool(wrong.any()):
                told = _unsorted(notes.sorts, text_of(step.file, step.number))
                place = _told(step, of, to, wrong, crossing, may_reduce=not told) + told
                return f"the latest at {place}{whole}" if mixed else place
            if step.file and not whole and axis == 1 and bool(of.all() and to.any(1).sum() > 1):
                whole = _of_all(step, crossing.words)
            mixed |= bool(((of.sum(0) > 1) & (bad & to).any(0)).any())
    return None


def _of_all(step: _Noted, words: str) -> str:
    return (
        f"; at {Path(step.file).name}:{step.number}: `{text_of(step.file, step.number)}` numbers are of all {words}s "
        "at once, later ones too, and outputs at each read them: a sum over the whole sequence where a running one is "
        "meant, say"
    )


def sorted_at(run: Callable[[], object]) -> bool:
    """Return whether a run sorts anything."""
    with torch.no_grad(), _Notes(copied=False) as notes:
        run()
    return bool(notes.sorts)


_SHARES = re.compile(r"softmax|sigmoid|topk|gate|rout")
"""On a line that makes the shares of experts, by which what they give is multiplied."""


def _unsorted(sorts: list[tuple[str, int]], crossing: str) -> str:
    """Say which of the two ways it went: what is sorted crosses, or the shares that it meets do."""
    if not sorts or not sorts[0][0]:
        return ""
    file, number = sorts[0]
    told = f"; they are sorted at {Path(file).name}:{number}: `{text_of(file, number)}`: "
    if _SHARES.search(crossing):
        return told + "the shares are not sorted along: what is sorted is multiplied by those of other tokens"
    return told + "what is sorted is not put back by the inverse of its order, or what it meets is not sorted along"


def _reached(output: Tensor, steps: list[_Noted], axis: int) -> Iterator[list[list[Tensor]]]:
    """Yield, of each place of the output, which numbers of each step it depends on."""
    weight = torch.arange(1, output.numel() + 1, device=output.device).reshape(output.shape).sin().to(output.dtype)
    flat = [x for step in steps for x in step.outputs]
    tracked = [x for x in flat if x.requires_grad]
    for place in range(output.shape[axis]):
        total = (output * weight).select(axis, place).sum()
        gradients = iter(torch.autograd.grad(total, tracked, retain_graph=True, allow_unused=True))
        found = [
            g != 0 if x.requires_grad and (g := next(gradients)) is not None else torch.zeros_like(x, dtype=torch.bool)
            for x in flat
        ]
        rest = iter(found)
        yield [[next(rest).flatten().cpu() for _ in step.outputs] for step in steps]


def _depends(
    run: Run, x: Tensor, other: Tensor, steps: list[_Noted], axis: int, limit: float
) -> Iterator[list[list[Tensor]]]:
    """Yield, of each place of the input, which numbers of each step depend on it; nothing if the ways part."""
    with torch.no_grad(), _Notes(copied=True) as before:
        run(x)
    if [s.key for s in before.steps] != [s.key for s in steps]:
        return
    for place in range(x.shape[axis]):
        changed = x.clone()
        changed.select(axis, place).copy_(other.select(axis, place))
        with torch.no_grad(), _Notes(copied=True) as after:
            run(changed)
        if [s.key for s in after.steps] != [s.key for s in before.steps]:
            return
        yield [
            [_differs(a, b, limit).flatten().cpu() for a, b in zip(one.outputs, two.outputs, strict=True)]
            for one, two in zip(before.steps, after.steps, strict=True)
        ]


_ALL = ": it is taken over all {words}s at once"
_SAID = {
    "roll": ": what is rolled past one end comes in at the other, and is not hidden there",
    **dict.fromkeys(("sum", "mean", "amax", "amin", "norm", "logsumexp", "std", "var"), _ALL),
}
"""What an operation does that mixes places, by its name."""


def _differs(a: Tensor, b: Tensor, limit: float) -> Tensor:
    if a.shape != b.shape:
        return torch.zeros_like(a, dtype=torch.bool)
    finite = a.isfinite() & b.isfinite()
    size = float(a[finite].abs().max()) if bool(finite.any()) else 0.0
    return torch.where(finite, (a - b).abs() > limit * size, a.isfinite() != b.isfinite())


def _told(step: _Noted, of: Tensor, to: Tensor, wrong: Tensor, crossing: Crossing, *, may_reduce: bool) -> str:
    place = f"{Path(step.file).name}:{step.number}: `{text_of(step.file, step.number)}`"
    reduced = wrong & (of.sum(0) > 1) & (of.sum(0) == of.shape[0])  # of all inputs at once
    if may_reduce and crossing.axis == 0 and bool(reduced.any()):
        return f"{place}: one number of it is of all {crossing.words}s, and outputs read it: it reduces over them"
    pairs = [(s, t) for s, t in crossing.forbidden.nonzero().tolist() if bool((of[s] & to[t] & wrong).any())]
    inputs, outputs = (sorted({pair[i] for pair in pairs}) for i in (0, 1))
    what = _SAID.get(step.name, "").format(words=crossing.words)
    return (
        f"{place}: what comes from {_places(inputs, crossing.words)} goes to {_places(outputs, 'output')} alone{what}"
    )


def _places(found: list[int], words: str) -> str:
    if len(found) == 1:
        return f"{words} {found[0]}"
    if found == list(range(found[0], found[-1] + 1)):
        return f"{words}s {found[0]} to {found[-1]}"
    return f"{words}s {', '.join(map(str, found[:6]))}{' ...' if len(found) > 6 else ''}"
