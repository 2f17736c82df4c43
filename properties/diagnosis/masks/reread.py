"""A padding mask whose entries are read in another order than they stand: reshaped where axes are to be exchanged."""

from __future__ import annotations

import torch

from veriformer.properties.diagnosis.masks.masked import Masked

_SAMPLES = 3


def reread_cause(masked: Masked, side: str) -> str | None:
    """Say that a mask `[B, T]` is read as `[T, B]` without being transposed.

    A mask whose entries are written in the order in which they would be read then mends the outputs of a batch; one
    sample has nothing that could be exchanged.
    """
    x = masked.draw(_SAMPLES)
    mask = masked.padded(x, [masked.length - 1, masked.real, masked.real + 2], side)
    alone = torch.cat([masked(x[b : b + 1], mask[b : b + 1]) for b in range(_SAMPLES)])
    written = mask.t().contiguous().reshape(mask.shape)
    if not bool(masked.at_real(masked.moved(masked(x, mask), alone), mask).any()):
        return None
    if bool(masked.at_real(masked.moved(masked(x, written), alone), mask).any()):
        return None
    return (
        "the mask [B, T] is read as [T, B] without being transposed (reshape or view for .t()): its entries fall on "
        "other tokens, of other samples, and of one sample alone all is right"
    )
