"""From which queries a hidden key is hidden, and from which it is not: those of other blocks, or of one side."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.masks.masked import Masked


def blocks_cause(masked: Masked, side: str) -> str | None:
    """Say which queries see hidden keys where others that may see them do not: a mask is lost on a part of its way.

    Args:
        masked: the subject.
        side: on which padding stands.
    """
    if not masked.per_position or masked.length < 6:
        return None
    x = masked.draw(1)
    reached = masked.sees(x, torch.ones_like(masked.padded(x, [masked.length], side))).T  # [T, S]
    leaks = torch.zeros_like(reached)
    for hidden in range(masked.length):
        mask = torch.ones(1, masked.length, dtype=torch.bool, device=x.device)
        mask[0, hidden] = False
        leaks[:, hidden] = masked.sees(x, mask).T[:, hidden]
    reached.fill_diagonal_(False)
    leaks.fill_diagonal_(False)
    leaks &= reached
    if not bool(leaks.any()) or torch.equal(leaks, reached):
        return None
    return _of_blocks(leaks, reached) or _of_one_side(leaks, reached)


def _of_blocks(leaks: Tensor, reached: Tensor) -> str | None:
    """Tell keys of other blocks than the query's own, for the one size of blocks that fits."""
    at = torch.arange(len(leaks))
    for size in range(len(leaks) - 1, 1, -1):
        apart = (at // size)[:, None] != (at // size)[None]
        for those, told in (
            (apart, "of blocks beside the query's own are seen, those of its own block are not"),
            (~apart, "of the query's own block are seen, those of blocks beside it are not"),
        ):
            if torch.equal(leaks, reached & those):
                return f"in blocks of {size}, hidden keys {told}: there the mask is lost, or of other positions"
    return None


def _of_one_side(leaks: Tensor, reached: Tensor) -> str | None:
    behind = torch.ones_like(leaks).tril(-1)
    for those, told in ((behind, "behind it alone"), (behind.T, "before it alone")):
        if torch.equal(leaks, reached & those) and bool((reached & ~those).any()):
            return f"a hidden key is seen by the queries {told}, and hidden from the others"
    return None
