"""Faults put around a subject: its `forward` is wrapped, the model is called as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.power.injection import Forward, Injected

_MASKS = ("attention_mask", "source_mask", "target_mask", "memory_mask")


def future_by_one(forward: Forward, share: float) -> Injected:
    """Add the next position's output to each."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        return output + share * torch.cat([output[:, 1:], output[:, -1:]], dim=1)

    return Injected(broken)


def last_everywhere(forward: Forward, share: float) -> Injected:
    """Add the last position's output to each, without its gradient."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        return output + share * output[:, -1:].detach()

    return Injected(broken)


def mask_ignored(forward: Forward, share: float) -> Injected:
    """Call without any mask."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        kept = {k: v for k, v in kwargs.items() if k not in _MASKS and v is not None}
        return forward(model, *args, **kept)

    return Injected(broken)


def batch_mixed(forward: Forward, share: float) -> Injected:
    """Add the neighbouring sample's output to each."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        return output + share * output.roll(1, dims=0)

    return Injected(broken)


def dropout_left_on(forward: Forward, share: float) -> Injected:
    """Drop half of the outputs, in eval mode too: of a few entries some differ between calls."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        return torch.nn.functional.dropout(forward(model, *args, **kwargs), 0.5)

    return Injected(broken)


def order_mixed_in(forward: Forward, share: float) -> Injected:
    """Add a ramp over positions."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = forward(model, *args, **kwargs)
        steps = torch.arange(output.shape[1], dtype=output.dtype, device=output.device)
        return output + share * output.abs().mean() * steps[None, :, None]

    return Injected(broken)


def skip_dropped(forward: Forward, share: float) -> Injected:
    """Take a layer's input off its output."""

    def broken(model: Any, *args: Any, **kwargs: Any) -> Tensor:
        return forward(model, *args, **kwargs) - args[0]

    return Injected(broken)
