"""Rows of scores of which a block is hidden throughout: what its own maximum, -inf, makes of the row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def hidden_block_cause(run: Callable[[Tensor], Tensor], like: Tensor) -> str | None:
    """Say how many hidden scores side by side make NaN of a row in which others are visible.

    Args:
        run: the softmax, of `[R, S]` along the last axis.
        like: of the dtype and device of the scores.
    """
    for size in _SIZES:
        width, starts = 4 * size + 1, [0, size, 2 * size, 3 * size]
        rows = torch.linspace(-1, 1, width, dtype=like.dtype, device=like.device).repeat(len(starts), 1)
        for row, start in zip(rows, starts, strict=True):
            row[start : start + size] = -torch.inf
        spoilt = run(rows).isnan().any(-1).tolist()
        if size == 1 and any(spoilt):
            return None  # any hidden score makes NaN: no block is behind it
        if all(spoilt):
            return (
                f"NaN in rows of which {size} scores side by side are hidden, from a multiple of {size} on, and others "
                f"are not; with fewer hidden all is right: a block of {size} subtracts its own maximum, which is -inf"
            )
    return None
