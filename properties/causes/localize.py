"""Where in a model a difference enters: the innermost module whose inputs agree where its outputs do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.causes.lines import Kept, line_where_runs_part
from veriformer.properties.definitions.differences import size_of, worst_difference

Rows = Callable[[Tensor], Tensor | None]
"""The part of a tensor that must agree; None where it has no such part."""


def where_it_enters(
    module: Any,
    first: Callable[[], object],
    second: Callable[[], object],
    rows: Rows,
    limit: float,
    kept: Kept | None = None,
) -> str | None:
    """Run a model twice and name the innermost module behind which the two runs part, and the line if it is found.

    Args:
        module: of the subject; anything but a torch module gives None.
        first: one run.
        second: another, which must agree with it on `rows`.
        rows: of each module's inputs and outputs.
        limit: largest difference that is rounding, relative to the size of a tensor.
        kept: of every tensor on the way, what must agree; the line is looked for where it is given.

    Returns:
        `behind stack.layers.0.attention (SelfAttention), whose input is still right`, or None.
    """
    if not isinstance(module, nn.Module):
        return None
    place = _module(module, first, second, rows, limit)
    line = line_where_runs_part(first, second, kept, limit) if kept else ""
    if place and line:
        return f"{place.partition(', whose input')[0] if 'behind' in place else place}, at {line}"
    return place or (f"at {line}" if line else None)


def _module(
    module: nn.Module, first: Callable[[], object], second: Callable[[], object], rows: Rows, limit: float
) -> str | None:
    one, two = _run(module, first), _run(module, second)
    for (name, inside, outside), (again, inside_too, outside_too) in zip(one, two, strict=False):
        if name != again:
            return None  # the two runs take different ways
        if _agree(inside, inside_too, rows, limit) and not _agree(outside, outside_too, rows, limit):
            part = dict(module.named_modules())[name]
            if not name:
                return f"in the forward of {type(part).__name__} itself, not in one of its parts"
            return f"behind {name} ({type(part).__name__}), whose input is still right"
    return None


Call = tuple[str, list[Tensor], list[Tensor]]


def _run(module: nn.Module, call: Callable[[], object]) -> list[Call]:
    found: list[Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.append((name, list(_tensors((args, kwargs))), list(_tensors(output))))

        return hook

    hooks = [part.register_forward_hook(note(name), with_kwargs=True) for name, part in module.named_modules()]
    try:
        with torch.no_grad():
            call()
    finally:
        for hook in hooks:
            hook.remove()
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


def _agree(one: list[Tensor], two: list[Tensor], rows: Rows, limit: float) -> bool:
    for a, b in zip(one, two, strict=False):
        left, right = rows(a), rows(b)
        if left is None or right is None or left.shape != right.shape or not left.numel():
            continue
        if worst_difference(left, right, size_of(right)).error > limit or not bool(left.isfinite().all()):
            return False
    return True
