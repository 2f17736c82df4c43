"""Attention weights of any model: every softmax over the last axis of `[B, H, T, S]`, or `[B * H, T, T]`, it computes.

Whatever the modules are called and return: below autograd all attention ends in one operation. Fused kernels, which
show no weights, are replaced by plain products while one looks. Where no softmax is computed, weights that a module
returns in a tuple are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

_SOFTMAX = {torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default}
MOST = 64
"""Attentions that are kept of one forward; a model that computes more loops in a way that no picture shows."""


class _Softmaxes(TorchDispatchMode):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SOFTMAX and args[1] in (-1, result.ndim - 1) and len(self.weights) < MOST:
            weights = result.detach().float()
            if weights.ndim == 3 and weights.shape[1] == weights.shape[2] and not len(weights) % self.samples:
                weights = weights.unflatten(0, (self.samples, -1))
            if weights.ndim == 4 and weights.shape[-1] > 1 and len(weights) == self.samples:
                self.weights.append(weights)
        return result


@contextmanager
def unfused() -> Iterator[None]:
    """Run the block with attention as plain products, which every tool of torch understands."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def attentions(samples: int) -> Iterator[list[Tensor]]:
    """Collect the attention weights `[B, H, T, S]` that the block computes of a batch of `samples`, in order.

    They are there when the block has ended.
    """
    watching, returned = _Softmaxes(samples), list[Tensor]()

    def look(module: nn.Module, given: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else ():
            if _are_weights(value, samples) and not any(value is known for known in returned) and len(returned) < MOST:
                returned.append(value)

    looking = register_module_forward_hook(look)
    found: list[Tensor] = []
    try:
        with torch.no_grad(), unfused(), watching:
            yield found
    finally:
        looking.remove()
        found += watching.weights or [w.detach().float() for w in returned]


def _are_weights(value: Any, samples: int) -> bool:
    """Whether a module returned attention weights `[B, H, T, S]`: for those that compute them without a softmax."""
    if not isinstance(value, Tensor) or value.ndim != 4 or len(value) != samples or value.shape[-1] < 2:
        return False
    rows = value.sum(dim=-1)
    return bool((value >= 0).all()) and bool(((rows - 1).abs() < 1e-3).all())
