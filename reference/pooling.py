"""From one vector a token to one vector a sequence. Padding and register tokens are never read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from veriformer.reference.attention import softmax


class ClassTokenPooling(nn.Module):
    """The output at the class token, which stands first (Devlin et al. 2019)."""

    def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return `[B, D]` from extras `[B, E, D]`, tokens `[B, T, D]` and mask `[B, T]`, True = real."""
        return extras[:, 0]


class MeanPooling(nn.Module):
    """The mean over real tokens; zeros where there is none."""

    def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return `[B, D]` from extras `[B, E, D]`, tokens `[B, T, D]` and mask `[B, T]`, True = real."""
        real = mask[..., None]
        return torch.where(real, tokens, 0).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class MaxPooling(nn.Module):
    """The largest value over real tokens, channel by channel; zeros where there is none."""

    def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return `[B, D]` from extras `[B, E, D]`, tokens `[B, T, D]` and mask `[B, T]`, True = real."""
        largest = torch.where(mask[..., None], tokens, -torch.inf).amax(dim=1)
        return torch.where(mask.any(dim=1, keepdim=True), largest, 0)


class WeightedPooling(nn.Module):
    """The mean over real tokens, weighted by softmax(w x)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.score = nn.Linear(d_model, 1, bias=False)

    def forward(self, extras: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return `[B, D]` from extras `[B, E, D]`, tokens `[B, T, D]` and mask `[B, T]`, True = real."""
        scores = self.score(tokens).squeeze(-1).masked_fill(~mask, -torch.inf)
        return (softmax(scores)[:, None] @ tokens).squeeze(1)


POOLINGS: Mapping[str, Callable[[int], nn.Module]] = {
    "cls": lambda d_model: ClassTokenPooling(),
    "mean": lambda d_model: MeanPooling(),
    "max": lambda d_model: MaxPooling(),
    "weighted": WeightedPooling,
}
"""Makers of a pooling from d_model."""
