"""The modern Hopfield network: patterns stored as rows, a state that is drawn to the nearest of them."""

from __future__ import annotations

import torch
from torch import Tensor


def update(patterns: Tensor, state: Tensor, beta: float) -> Tensor:
    """Return softmax(beta state X^T) X (Ramsauer et al. 2021, equation 3).

    Args:
        patterns: X, `[N, D]`.
        state: `[..., D]`.
        beta: inverse temperature.
    """
    return torch.softmax(beta * state @ patterns.T, dim=-1) @ patterns


def energy(patterns: Tensor, state: Tensor, beta: float) -> Tensor:
    """Return -lse(beta X s) / beta + s.s / 2, up to a constant (equation 2); an update never raises it."""
    return -torch.logsumexp(beta * state @ patterns.T, dim=-1) / beta + state.square().sum(-1) / 2


def retrieved(patterns: Tensor, noise: float, beta: float, generator: torch.Generator) -> float:
    """Return the share of patterns that one update brings closer than half the distance to the nearest other pattern.

    Args:
        patterns: `[N, D]`.
        noise: standard deviation that is added to each entry of the state.
        beta: inverse temperature.
        generator: of the noise.
    """
    state = patterns + noise * torch.randn(patterns.shape, generator=generator, dtype=patterns.dtype)
    to_all = torch.cdist(update(patterns, state, beta), patterns)
    nearest = torch.cdist(patterns, patterns).fill_diagonal_(torch.inf).amin(dim=1)
    return (to_all.diagonal() < nearest / 2).double().mean().item()
