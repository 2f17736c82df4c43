"""Models whose backward writes to `.grad` alone (reversible layers, reentrant checkpoints), for torch.autograd.grad."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class _ByGrad(torch.autograd.Function):
    """Gives as gradients what a plain `.backward()` leaves in `.grad`; what stood there is put back."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *leaves: Tensor) -> Tensor:
        with torch.enable_grad():
            output = run()
        ctx.output, ctx.leaves = output, leaves
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        kept = [leaf.grad for leaf in ctx.leaves]
        for leaf in ctx.leaves:
            leaf.grad = None
        raised: list[BaseException] = []

        def backwards() -> None:
            try:
                torch.autograd.backward(ctx.output, incoming[0], retain_graph=True)
            except BaseException as problem:
                raised.append(problem)

        # a thread of its own: a reentrant checkpoint asks whether a plain backward is what runs in its thread
        thread = threading.Thread(target=backwards)
        thread.start()
        thread.join()
        found = [leaf.grad for leaf in ctx.leaves]
        for leaf, grad in zip(ctx.leaves, kept, strict=True):
            leaf.grad = grad
        if raised:
            raise raised[0]
        return (None, *found)


def by_grad(model: nn.Module, x: Tensor, **given: Any) -> Tensor:
    """Return `model(x, **given)`, whose gradients are those that `.backward()` accumulates.

    Args:
        model: whose layers call `backward` themselves, so that `torch.autograd.grad` finds nothing or is refused.
        x: tokens `[B, T]` or embeddings `[B, T, D]`.
        given: keywords, masks among them.
    """
    inner = x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x
    leaves = [p for p in model.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (leaves or x.requires_grad):
        return model(x, **given)
    if not x.requires_grad:
        return _ByGrad.apply(lambda: model(x, **given), *leaves)
    # the caller's tensor stands for the inner one: a leaf of a graph of its own, whose `.grad` is read
    return _WithInput.apply(lambda: model(inner, **given), inner, x, *leaves)


class _WithInput(_ByGrad):
    """As `_ByGrad`, for a differentiable input: the gradient of its detached copy is its own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], inner: Tensor, _: Tensor, *leaves: Tensor) -> Tensor:
        return _ByGrad.forward(ctx, run, inner, *leaves)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        _, *found = _ByGrad.backward(ctx, *incoming)
        return (None, None, *found)
