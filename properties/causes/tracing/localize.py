"""Where in a model a difference enters: the innermost module whose inputs agree where its outputs do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.causes.tracing.lines import Kept, line_where_runs_part, tensors_of
from veriformer.properties.causes.tracing.provenance import Crossing, line_that_crosses
from veriformer.properties.definitions.differences import size_of, worst_difference

_STEP = 0.02
Rows = Callable[[Tensor], Tensor | None]
"""The part of a tensor that must agree; None where it has no such part."""


def where_it_enters(
    module: Any,
    first: Callable[[], object],
    second: Callable[[], object],
    rows: Rows,
    limit: float,
    kept: Kept | None = None,
    crossing: Crossing | None = None,
    every_input: bool = False,
    ways_differ: bool = False,
) -> str | None:
    """Run a model twice and name the innermost module behind which the two runs part, and the line if it is found.

    Args:
        module: of the subject; anything but a torch module gives None.
        first: one run.
        second: another, which must agree with it on `rows`.
        rows: of each module's inputs and outputs.
        limit: largest difference that is rounding, relative to the size of a tensor.
        kept: of every tensor on the way, what must agree; the line is looked for where it is given.
        crossing: what must not reach what; where no line is found so, it is looked for number by number.
        every_input: whether a module counts only if all that it is given is of the lengths that `rows` cuts: what a
            strided convolution gives cannot be compared, and may be wrong already.
        ways_differ: whether the runs may call other modules: those that both call are compared.

    Returns:
        `behind stack.layers.0.attention (SelfAttention), whose input is still right`, or None.
    """
    if not isinstance(module, nn.Module):
        return None
    name = _module(module, first, second, rows, limit, every_input, ways_differ)
    line = line_where_runs_part(first, second, kept, limit) if kept else ""
    if name is None:
        return f"at {line}" if line else None
    part = dict(module.named_modules())[name]
    if not line and crossing is not None:
        line = _crosses(part, first, second, crossing, limit) or ""
    kind = type(part).__name__
    if not name:
        return f"in the forward of {kind} itself, not in one of its parts{f', at {line}' if line else ''}"
    return f"behind {name} ({kind}), {f'at {line}' if line else 'whose input is still right'}"


def _module(
    module: nn.Module,
    first: Callable[[], object],
    second: Callable[[], object],
    rows: Rows,
    limit: float,
    every_input: bool,
    ways_differ: bool,
) -> str | None:
    """Return the name of the innermost module behind which two runs part; "" is the model itself."""
    one, two = _run(module, first), _run(module, second)
    if ways_differ:
        shared = {name for name, *_ in one} & {name for name, *_ in two}
        one, two = ([call for call in calls if call[0] in shared] for calls in (one, two))
    for (name, inside, outside), (again, inside_too, outside_too) in zip(one, two, strict=False):
        if name != again:
            return None  # the two runs take different ways
        if _agree(inside, inside_too, rows, limit) and not _agree(outside, outside_too, rows, limit):
            return name if not every_input or all(map(partial(_comparable, rows), inside, inside_too)) else None
    return None


def _crosses(
    part: nn.Module, first: Callable[[], object], second: Callable[[], object], crossing: Crossing, limit: float
) -> str | None:
    """Look inside one module for the line that mixes what must be apart, along the first input that has such places."""
    if crossing.axis == 0 and getattr(part, "batch_first", None) is False:
        return f"its own first axis, which is time to a {type(part).__name__} without batch_first=True"
    (args, kwargs), again = _given(part, first), _given(part, second)
    places = crossing.forbidden.shape[0]
    pairs = zip(tensors_of((args, kwargs)), tensors_of(again), strict=True)
    fitting = ((a, b) for a, b in pairs if a.ndim > crossing.axis and a.shape[crossing.axis] == places)
    x, changed = next(((a, b) for a, b in fitting if a.shape == b.shape and a.dtype != torch.bool), (None, None))
    if x is None or changed is None:
        return None
    whole = torch.where(changed == x, x.roll(1, crossing.axis), changed)
    near = [torch.lerp(x, whole, _STEP)] if x.is_floating_point() else []  # so little that all is chosen as before
    for other in (*near, whole):
        line = line_that_crosses(
            lambda given: part(*_with(args, x, given), **_with(kwargs, x, given)), x, other, crossing, limit
        )
        if line:
            return line
    return None


def _given(part: nn.Module, call: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a module is given in its first call of a run."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = part.register_forward_pre_hook(lambda _, args, kwargs: found.append((args, kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            call()
    finally:
        hook.remove()
    return found[0]


def _with(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments with one tensor, wherever it stands, replaced."""
    if isinstance(value, Tensor):
        return new if value is old or (value.shape == old.shape and torch.equal(value, old)) else value
    if isinstance(value, tuple):
        return tuple(_with(item, old, new) for item in value)
    if isinstance(value, list):
        return [_with(item, old, new) for item in value]
    return {name: _with(item, old, new) for name, item in value.items()} if isinstance(value, dict) else value


Call = tuple[str, list[Tensor], list[Tensor]]


def _run(module: nn.Module, call: Callable[[], object]) -> list[Call]:
    found: list[Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.append((name, list(_tensors((args, kwargs))), list(_tensors(output))))

        return hook

    hooks = (part.register_forward_hook(note(name), with_kwargs=True) for name, part in module.named_modules())
    with hooked(hooks), torch.no_grad():
        call()
    return found


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach().clone()
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, dict):
        yield from _tensors(list(value.values()), depth - 1)


def _comparable(rows: Rows, one: Tensor, two: Tensor) -> bool:
    left, right = rows(one), rows(two)
    return left is not None and right is not None and left.shape == right.shape


def _agree(one: list[Tensor], two: list[Tensor], rows: Rows, limit: float) -> bool:
    for a, b in zip(one, two, strict=False):
        left, right = rows(a), rows(b)
        if left is None or right is None or left.shape != right.shape or not left.numel():
            continue
        if worst_difference(left, right, size_of(right)).error > limit or not bool(left.isfinite().all()):
            return False
    return True
