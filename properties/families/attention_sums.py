"""Weights that are summed up before they meet the values, so that nothing is mixed; part of `attention.attends`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NEAR = 1e-6


class _Weights(TorchFunctionMode):
    """Keeps what softmaxes over several entries give, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax" and isinstance(result, Tensor) and result.requires_grad:
            self.made.append(result)
        return result


def summed_away(run: Callable[[], Tensor]) -> str | None:
    """Say that an output takes of each row of attention weights their sum alone, or nothing of them.

    Args:
        run: calls a model of which no output depends on another position.
    """
    with torch.enable_grad(), _Weights() as seen:
        output = run()
    weights = [w for w in seen.made if w.ndim > 2 and w.shape[-1] > 1 and bool((w < 0.999).all(-1).any())]
    if not weights or not output.requires_grad:
        return None
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    slopes = torch.autograd.grad((output * weight).sum(), weights, allow_unused=True)
    if all(slope is None for slope in slopes):
        return "weights are made by a softmax, and the output does not depend on them: the values are not weighed"
    rows = [slope for slope in slopes if slope is not None]
    if all(float((g - g[..., :1]).abs().max()) <= _NEAR * float(g.abs().max()) for g in rows if bool(g.any())):
        return (
            "of each row of the softmax's weights the output takes their sum alone, which is 1: the values are those "
            "of the query's own position, not of the keys, as where the product of weights and values sums over no "
            "axis that both have"
        )
    return None
