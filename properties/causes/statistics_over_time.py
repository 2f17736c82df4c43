"""Norms whose statistics run over positions: what stands at one of them changes all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.definitions.differences import size_of


def norm_over_time(module: Any, call: Callable[[], object], length: int) -> str | None:
    """Name the first norm in a model by which a change of the last position reaches others.

    Args:
        module: of the subject; anything but a torch module gives None.
        call: runs it.
        length: of its sequence, a size that nothing else in it has.
    """
    if not isinstance(module, nn.Module):
        return None
    found: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any) -> None:
            x = args[0] if args else None
            if found or not isinstance(x, Tensor) or x.ndim < 3 or length not in x.shape:
                return
            axis = [*x.shape].index(length)
            changed = x.clone()
            changed.select(axis, length - 1).mul_(-3).add_(1)
            one, two = (part.forward(y).narrow(axis, 0, length - 1) for y in (x, changed))
            if float((one - two).abs().max()) > 1e-3 * size_of(one):
                found.append(f"{name} ({type(part).__name__})")

        return hook

    hooks = (p.register_forward_pre_hook(note(name)) for name, p in module.named_modules() if name and is_norm(p))
    with hooked(hooks), torch.no_grad():
        call()
    return f"{found[0]} takes its mean and variance over all positions, later ones too" if found else None
