"""Convolutions over positions that are given padding which is not zero: it is mixed into real positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.adapters.shared.hooks import hooked
from veriformer.properties.definitions.differences import size_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_Given = list[tuple[str, Tensor, Tensor]]


def convolved_padding(
    module: Any, alone: Callable[[], object], among: Callable[[], object], limit: float
) -> str | None:
    """Name the convolution that mixes padding on the right into what is real, where its real inputs are right.

    Args:
        module: of the subject.
        alone: runs it on a sample without padding.
        among: on the same sample with padding behind it.
        limit: largest difference that is rounding, relative to the size of a tensor.
    """
    if not isinstance(module, nn.Module):
        return None
    short, long = _given(module, alone), _given(module, among)
    for (name, x, y), (again, padded, out) in zip(short, long, strict=False):
        if name != again:
            return None
        axis = next((a for a in range(2, x.ndim) if padded.shape[a] > x.shape[a]), None)
        if axis is None:
            continue
        real, made = padded.narrow(axis, 0, x.shape[axis]), out.narrow(axis, 0, min(y.shape[axis], out.shape[axis]))
        if made.shape != y.shape or real.shape != x.shape or _apart(real, x, limit):
            return None  # wrong before, or cut otherwise
        filled = padded.narrow(axis, x.shape[axis], padded.shape[axis] - x.shape[axis])
        if _apart(made, y, limit) and size_of(filled) > limit * size_of(x):
            kind = type(module.get_submodule(name)).__name__
            return (
                f"{name} ({kind}) is given padded positions that are not zero, and mixes them into real ones beside "
                "them: the mask is not applied in front of it"
            )
    return None


def _apart(one: Tensor, other: Tensor, limit: float) -> bool:
    return float((one - other).abs().max()) > limit * max(size_of(other), 1e-30)


def _given(module: nn.Module, run: Callable[[], object]) -> _Given:
    """Return what every convolution with a kernel of more than one place is given, and gives, in order."""
    found: _Given = []

    def note(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, output: Any) -> None:
            found.append((name, args[0].detach().clone(), output.detach().clone()))

        return hook

    wide = {n: m for n, m in module.named_modules() if isinstance(m, _CONVOLUTIONS) and max(m.kernel_size) > 1}
    with hooked(part.register_forward_hook(note(name)) for name, part in wide.items()), torch.no_grad():
        run()
    return found
