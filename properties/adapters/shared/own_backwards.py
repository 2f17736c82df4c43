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


def by_grad(run: Callable[[Tensor], Tensor], x: Tensor, leaves: list[nn.Parameter]) -> Tensor:
    """Return `run(x)`, whose gradients are those that `.backward()` accumulates.

    Args:
        run: layers that call `backward` themselves, so that `torch.autograd.grad` finds nothing or is refused.
        x: tokens `[B, T]` or embeddings `[B, T, D]`.
        leaves: parameters that ask for gradients.
    """
    if not torch.is_grad_enabled() or not (leaves or x.requires_grad):
        return run(x)
    if not x.requires_grad:
        found: Tensor = _ByGrad.apply(lambda: run(x), *leaves)  # type: ignore[no-untyped-call]
        return found
    inner = x.detach().requires_grad_()  # a leaf, whose `.grad` is read
    found = _WithInput.apply(lambda: run(inner), inner, x, *leaves)  # type: ignore[no-untyped-call]
    return found


class _WithInput(_ByGrad):
    """As `_ByGrad`, for a differentiable input: the gradient of its detached copy is its own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], inner: Tensor, _: Tensor, *leaves: Tensor) -> Tensor:
        return _ByGrad.forward(ctx, run, inner, *leaves)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        _, *found = _ByGrad.backward(ctx, *incoming)
        return (None, None, *found)


class ByGrad(nn.Module):
    """A model whose gradients are those of a plain `.backward()`: what `by_grad` gives, as a module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """Call the model."""
        return by_grad(lambda inner: self.net(inner, **given), x, self._leaves())

    def from_embeddings(self, embeddings: Tensor, table: nn.Module, **given: Any) -> Tensor:
        """Call the model with embeddings `[B, T, D]` in place of what its table gives; what it pads itself stays."""

        def run(inner: Tensor) -> Tensor:
            length = inner.shape[1]
            hook = table.register_forward_hook(lambda _, __, out: torch.cat([inner, out[:, length:]], dim=1))
            try:
                found: Tensor = self.net(torch.zeros(inner.shape[:2], dtype=torch.long, device=inner.device), **given)
                return found
            finally:
                hook.remove()

        return by_grad(run, embeddings, self._leaves())

    def _leaves(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]
