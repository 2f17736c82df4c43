"""Initial weights that keep lengths, to stand beside those that keep variances (Saxe et al. 2014)."""

from __future__ import annotations

import torch
from torch import nn


def orthogonal(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every linear map's weight anew with orthonormal rows, or columns where it widens; leave biases alone.

    A square one keeps the length of every vector, and so do its transpose and any product of such maps, where
    independent entries keep it on average only.

    Args:
        model: changed in place.
        generator: of the weights.

    Source: Saxe, McClelland & Ganguli 2014, section 3.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, generator=generator)
