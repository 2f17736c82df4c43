"""Weights that start at zero behind others that do: none of them ever learns; part of `training.parameters-move`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.engine.calling import Caller

_RATE = 1e-3


def held_at_zero(call: Caller, module: nn.Module, batches: list[list[Tensor]], steps: int) -> list[str]:
    """Return the names of parameters that are zero and never get a gradient, since others that they meet are zero too.

    In `B A x` the gradient of A is `B^T g x^T` and that of B is `g (A x)^T`: both are zero where A and B are. Of two
    alone one may be zero. What no gradient reaches for another reason (experts nobody chose) has none with other values
    either, and is left out. Values are put back.

    Args:
        call: of the module.
        module: as it was initialised.
        batches: inputs.
        steps: against the sign of the gradient, before a parameter counts as held.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    zero = [name for name, p in named if not bool(p.detach().any())]
    if len(zero) < 2 or not any(p.ndim > 1 for name, p in named if name in zero):
        return []
    before = {name: p.detach().clone() for name, p in named}
    held = [name for name in zero if name not in _reached(call, named, batches)]
    for step in range(steps if len(held) > 1 else 0):
        held = [name for name in held if name not in _reached(call, named, batches[step % len(batches) :][:1], _RATE)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in named:
            p.copy_(before[name])
            if name in held:
                p.copy_(torch.randn(p.shape, generator=generator))
    met = _reached(call, named, batches) if len(held) > 1 else set()
    with torch.no_grad():
        for name, p in named:
            p.copy_(before[name])
    return [name for name in held if name in met]


def _reached(
    call: Caller, named: list[tuple[str, nn.Parameter]], batches: list[list[Tensor]], rate: float = 0.0
) -> set[str]:
    """Return the names of the parameters that a gradient reaches, each of which takes a step of a size."""
    reached: set[str] = set()
    for batch in batches:
        output = call(*batch)
        if not output.requires_grad:
            return {name for name, _ in named}
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        gradients = torch.autograd.grad((output * weight).sum(), [p for _, p in named], allow_unused=True)
        for (name, p), gradient in zip(named, gradients, strict=True):
            dense = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
            if dense is not None and bool(dense.any()):
                reached.add(name)
                with torch.no_grad():
                    p.sub_(rate * dense.sign())
    return reached
