"""Weights that a forward rounds and whose rounding lets no gradient through; part of `training.parameters-move`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.watches import DispatchWatch
from veriformer.properties.engine.calling import Caller

_ROUNDINGS = ("round", "floor", "ceil", "trunc", "sign", "sgn")
_LEAST = 4
"""Channels of a row of which one alone has a gradient, before that is no accident."""


def cut_by_rounding(call: Caller, module: nn.Module, batch: list[Tensor]) -> list[str]:
    """Return the names of matrices that are rounded, and of which at most one entry a row has a gradient.

    The derivative of a rounding is zero. Quantisation that is trained through passes the gradient on as if nothing was
    rounded (a straight-through estimator); without that the largest entry of a row alone has one, by the step that it
    sets. Where others have one, and these are the smallest, it is passed on in a range that is too narrow. Where no
    entry has one, as of an expert that nobody chose, `parameters.all-used` speaks.

    Args:
        call: of the module.
        module: as it was initialised.
        batch: inputs, several tokens of which each reaches most entries of a matrix.
    """
    return list(_cut(call, module, batch))


def _cut(call: Caller, module: nn.Module, batch: list[Tensor]) -> dict[str, bool]:
    """Return for each such name whether the smallest entries of the matrix are those that have a gradient."""
    matrices = {name: p for name, p in module.named_parameters() if p.requires_grad and p.ndim >= 2}
    matrices = {name: p for name, p in matrices.items() if p.shape[-1] >= _LEAST and p.is_floating_point()}
    was = module.training
    module.eval()
    try:
        with RoundingWatch() as seen:
            output = call(*batch)
    finally:
        module.train(was)
    matrices = {name: p for name, p in matrices.items() if p.shape in seen.shapes}
    if not matrices or not isinstance(output, Tensor) or not output.requires_grad:
        return {}
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    found = torch.autograd.grad((output * weight).sum(), list(matrices.values()), allow_unused=True)
    cut = {name: g for name, g in zip(matrices, found, strict=True) if g is not None and _is_cut(g)}
    return {name: _is_of_smallest(matrices[name], g) for name, g in cut.items()}


class RoundingWatch(DispatchWatch):
    """Notes the shapes of what is rounded to whole numbers.

    Attributes:
        shapes: of tensors that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in _ROUNDINGS and args and isinstance(args[0], Tensor):
            self.shapes.add(args[0].shape)
        return result


def _is_cut(gradient: Tensor) -> bool:
    return bool((gradient != 0).flatten(0, -2).sum(-1).amax() == 1)


def _is_of_smallest(matrix: Tensor, gradient: Tensor) -> bool:
    """Whether every entry with a gradient is smaller, relative to the largest of its row, than every other one."""
    sizes = matrix.detach().abs()
    sizes = sizes / sizes.amax(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
    passed = gradient != 0
    return bool(sizes[passed].amax() < sizes[~passed].amin())


def rounding_words(call: Caller, module: nn.Module, batch: list[Tensor]) -> str:
    """Say why the first of the rounded matrices has no gradient but for single entries; see `cut_by_rounding`."""
    name, is_of_smallest = next(iter(_cut(call, module, batch).items()))
    if is_of_smallest:
        return (
            f"{name} is rounded, and its smallest entries alone have a gradient: it is passed on through the rounding "
            "(straight-through) within a range that is too narrow, where all of what is not clipped is to have one"
        )
    return (
        f"{name} is rounded, and the rounding lets no gradient through, for its derivative is zero: what is trained "
        "passes it on as if nothing was rounded, w + (rounded - w).detach()"
    )


def cancelled_words(output: Tensor, name: str, parameter: nn.Parameter) -> str | None:
    """Say that a parameter's two gradients cancel, where the graph of an output adds it and subtracts it again."""
    users, seen, left = set[str](), set[Any](), [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for later, _ in node.next_functions:
            if getattr(later, "variable", None) is parameter:
                users.add(type(node).__name__)
            left.append(later)
    if not {"AddBackward0", "SubBackward0"} <= users:
        return None
    return (
        f"{name} is added and taken off again, and its two gradients cancel, as in w + rounded.detach() - w where "
        "w + (rounded - w).detach() passes it on (straight-through)"
    )
