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
    def forward(ctx: Any, run: Callable[[], Tensor], inner: Tensor | None, _: Tensor, *parameters: Tensor) -> Tensor:
        """Call `run`, in which `inner` stands for an input that asks for a gradient."""
        with torch.enable_grad():
            output = run()
        ctx.output, ctx.inner, ctx.parameters = output, inner, parameters
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of the parameters."""
        leaves = [*([] if ctx.inner is None else [ctx.inner]), *ctx.parameters]
        kept = [leaf.grad for leaf in leaves]
        for leaf in leaves:
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
        found = [leaf.grad for leaf in leaves]
        for leaf, grad in zip(leaves, kept, strict=True):
            leaf.grad = grad
        if raised:
            raise raised[0]
        return (None, None, *([None] if ctx.inner is None else []), *found)


def by_grad(run: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Return `run(x)`, whose gradients are those that `.backward()` accumulates.

    Args:
        run: layers that call `backward` themselves, so that `torch.autograd.grad` finds nothing or is refused.
        x: tokens `[B, T]` or embeddings `[B, T, D]`.
        parameters: that ask for gradients.
    """
    if not torch.is_grad_enabled() or not (parameters or x.requires_grad):
        return run(x)
    inner = x.detach().requires_grad_() if x.requires_grad else None  # a leaf, whose `.grad` is read
    found: Tensor = _ByGrad.apply(lambda: run(x if inner is None else inner), inner, x, *parameters)
    return found


class ByGrad(nn.Module):
    """A model whose gradients are those of a plain `.backward()`: what `by_grad` gives, as a module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """Call the model."""
        return by_grad(lambda inner: self.net(inner, **given), x, self._parameters_to_train())

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

        return by_grad(run, embeddings, self._parameters_to_train())

    def _parameters_to_train(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]
