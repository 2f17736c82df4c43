"""Parameters that a constructor makes and never gives a value: they hold whatever the memory held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Filled(TorchDispatchMode):
    """Fills memory that is asked for without a value with a number, so that what is never written shows."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _EMPTY and isinstance(made, Tensor) and made.is_floating_point():
            made.fill_(self.value)
        return made


def uninitialised(build: Callable[[], Any]) -> tuple[str, ...]:
    """Return the names of the parameters of what is built that nothing was written into, in part or at all.

    Args:
        build: makes a model; what it raises is told by whoever builds the model that is judged.
    """
    try:
        with torch.random.fork_rng(devices=[]), Filled(float("nan")):
            module = build()
        if not isinstance(module, nn.Module):
            return ()
        return tuple(name for name, p in module.named_parameters() if p.is_floating_point() and _has_nan(p))
    except (Exception, SystemExit):
        return ()


def _has_nan(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, nn.parameter.UninitializedParameter) and bool(parameter.isnan().any())


def give_values(module: nn.Module, names: tuple[str, ...], seed: int) -> None:
    """Give parameters that have no values ordinary ones: ones to vectors, unit gain to matrices."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name in names:
            p = parameters[name]
            drawn = torch.randn(p.shape, generator=generator) / max(p[0].numel(), 1) ** 0.5 if p.ndim > 1 else None
            p.copy_(torch.ones(p.shape) if drawn is None else drawn)
