"""Sinusoids of sums of two angles, one of a block of positions and one inside of it: signs of the addition theorems."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCKS = (*range(2, 65), 100, 128, 256, 512)
"""Positions of a block that are tried."""


def angle_sum_cause(sine: Tensor, cosine: Tensor, positions: Tensor, base: float, bound: float) -> str | None:
    """Say which part of a table is that of the difference of two angles that are to be added; None if none is.

    With a the angle of the first position of a block, and b that of the place in it, a sign in
    sin(a + b) = sin a cos b + cos a sin b or cos(a + b) = cos a cos b - sin a sin b makes one of a - b.

    Args:
        sine: `[T, D/2]`, as the table has them.
        cosine: `[T, D/2]`.
        positions: `[T]`.
        base: declared.
        bound: on the rounding of an entry.
    """
    pairs = sine.shape[1]
    omega = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    sine, cosine, positions = sine.double().cpu(), cosine.double().cpu(), positions.double().cpu()
    angles = positions[:, None] * omega
    wrong = [bool(((got - right).abs() > bound).any()) for got, right in ((sine, angles.sin()), (cosine, angles.cos()))]
    if not any(wrong):
        return None
    for block in _BLOCKS:
        inside = positions % block
        apart = (positions - 2 * inside)[:, None] * omega
        guess = (apart.sin() if wrong[0] else angles.sin(), apart.cos() if wrong[1] else angles.cos())
        if all(bool(((got - one).abs() <= bound).all()) for got, one in zip((sine, cosine), guess, strict=True)):
            what = " and ".join(name for name, is_wrong in zip(("sine", "cosine"), wrong, strict=True) if is_wrong)
            return (
                f"the {what} of a - b in the place of a + b, with a the angle of every {block}th position and b that "
                "of those behind it: a sign of the addition theorem is wrong"
            )
    return None
