"""Parts taken out of a built model where no field of the configuration removes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class _NoAttention(nn.Module):
    """Attention that brings nothing: zeros, and no weights."""

    def forward(self, x: Tensor, memory: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor]:
        """Return zeros like `x`, and no weights."""
        return torch.zeros_like(x), x.new_zeros(())


class _NoFeedForward(nn.Module):
    """A feed-forward network that brings nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros like `x`."""
        return torch.zeros_like(x)


def _replace(model: nn.Module, name: str, make: Callable[[], nn.Module]) -> None:
    found = [module for module in model.modules() if isinstance(getattr(module, name, None), nn.Module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no {name} that could be taken out")
    for module in found:
        setattr(module, name, make())


EDITS: Mapping[str, Callable[[nn.Module], None]] = {
    "no cross-attention": lambda model: _replace(model, "cross_attention", _NoAttention),
    "no closing norm": lambda model: _replace(model, "final_norm", nn.Identity),
    "no feed-forward": lambda model: _replace(model, "feed_forward", _NoFeedForward),
}
"""Changes to a model in place, by name."""
