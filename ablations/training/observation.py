"""What is watched while a model trains: gradient norms by layer, attention entropy by layer and head."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_LAYER = re.compile(r"^(?:stack\.|(encoder|decoder)\.)?layers\.(\d+)\.")


def part_of(parameter: str) -> str:
    """Return the part of the model that a parameter belongs to: a layer, or what stands before or after them.

    >>> part_of("stack.layers.3.attention.q_proj.weight"), part_of("classify.bias")
    ('layer 4', 'output')
    """
    found = _LAYER.match(parameter)
    if found:
        return f"{found[1] + ' ' if found[1] else ''}layer {int(found[2]) + 1}"
    before = ("embedding", "source_embedding", "target_embedding", "extras", "cnn")
    return "embedding" if parameter.startswith(before) else "output"


def gradient_norms(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of the gradient of each part, `[seeds]`, from stacked parameters `[seeds, ...]`."""
    squares: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            square = parameter.grad.flatten(1).square().sum(dim=1)
            part = part_of(name)
            squares[part] = squares[part] + square if part in squares else square
    return {part: square.sqrt() for part, square in squares.items()}


def attention_entropy(weights: Tensor) -> Tensor:
    """Return the entropy of attention weights over that of uniform ones, by seed and head: 1 spread, 0 one key.

    A row that sees a single key has no choice and is left out; a key of weight zero counts as unseen only where a
    causal mask forbids it, which is told by the row's index.

    Args:
        weights: `[seeds, B, H, T, S]`; rows sum to one.
    """
    entropy = -torch.xlogy(weights, weights).sum(dim=-1)
    rows, keys = weights.shape[-2:]
    forbidden = rows == keys and bool((weights.triu(1) == 0).all())
    seen = torch.arange(1, rows + 1, device=weights.device) if forbidden else torch.full((rows,), keys)
    most = seen.to(weights).log()
    return (entropy / most)[..., most > 0].mean(dim=(1, 3))
