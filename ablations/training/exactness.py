"""Theorems about trained models, verified in float64 where rounding is far from any real difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROUNDING = 1e-9
"""Largest relative difference that counts as none. In float64 a few thousand dependent roundings of 1.1e-16 reach 1e-12
even when each is amplified tenfold; a trained model that sees order differs by 1e-2 and more."""


@dataclass(frozen=True)
class Exactness:
    """Outcome of one check: largest difference of logits over their largest size, and how many inputs."""

    difference: float
    inputs: int

    @property
    def holds(self) -> bool:
        """Whether the difference is rounding alone."""
        return self.difference <= ROUNDING


def _difference(model: nn.Module, tokens: Tensor, rearranged: list[Tensor]) -> Exactness:
    with torch.no_grad():
        logits = model(tokens)
        size = logits.abs().max()
        worst = max(float((model(other) - logits).abs().max()) for other in rearranged)
    return Exactness(worst / max(float(size), 1e-300), len(tokens) * len(rearranged))


def permutation(model: nn.Module, tokens: Tensor) -> Exactness:
    """Check that no permutation of the tokens changes the logits: attention is equivariant, pooling invariant.

    Every exchange of neighbours is tried, which generate all permutations, and 16 random ones beside.

    Source: Lee et al. 2019, section 3; Zaheer et al. 2017.
    """
    length = tokens.shape[1]
    orders = []
    for place in range(length - 1):
        order = torch.arange(length, device=tokens.device)
        order[[place, place + 1]] = order[[place + 1, place]]
        orders.append(order)
    generator = torch.Generator().manual_seed(0)
    orders += [torch.randperm(length, generator=generator).to(tokens.device) for _ in range(16)]
    return _difference(model, tokens, [tokens[:, order] for order in orders])


def reversal(model: nn.Module, tokens: Tensor) -> Exactness:
    """Check that the reverse gives the same logits: neither |t - s| nor a symmetric pooling tells left from right."""
    return _difference(model, tokens, [tokens.flip(1)])


def source(model: nn.Module, source: Tensor, target: Tensor) -> Exactness:
    """Check that another sample's source gives the same logits: what no layer attends to is not known."""
    with torch.no_grad():
        logits = model(source, target)
        worst = max(float((model(source.roll(by, 0), target) - logits).abs().max()) for by in (1, len(source) // 2))
        return Exactness(worst / max(float(logits.abs().max()), 1e-300), 2 * len(source))


CHECKS: Mapping[str, Callable[..., Exactness]] = {"permutation": permutation, "reversal": reversal, "source": source}
"""Checks of a trained model (in float64, eval mode) by name, on what it is called with: tokens `[B, T]`, views, or
source `[B, S]` and target `[B, T]`."""
