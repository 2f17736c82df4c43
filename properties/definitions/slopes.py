"""The slopes of ALiBi by either of its two rules, which agree where the heads are a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.reference.position_bias import alibi_slopes


def slopes_by(rule: str | None, num_heads: int) -> Tensor:
    """Return the slope of each head.

    Args:
        rule: "geometric": 2^(-8 i / H), i = 1..H, of any number of heads; else the interleaving of two powers of two.
        num_heads: H >= 1.

    Returns:
        float64 `[H]`.

    Source: Press et al. 2022, section 3, has the geometric one for any H; its authors' code interleaves.

    >>> slopes_by("geometric", 2).tolist() == slopes_by(None, 2).tolist() == [0.0625, 0.00390625]
    True
    """
    if rule == "geometric":
        return 2.0 ** (-8 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)
    return torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)


def is_geometric(slopes: Tensor) -> bool:
    """Whether slopes `[H]` are 2^(-8 i / H), up to rounding in float32."""
    return bool((slopes - slopes_by("geometric", len(slopes))).abs().amax() < 1e-5)
