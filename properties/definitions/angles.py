"""The angles of sinusoidal and rotary positions, far out too: how well float32 knows them, and how tables lay them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from veriformer.properties.definitions.rounding import epsilon


def places(length: int) -> Tensor:
    """Return the positions below `length` at which a count goes wrong first: around every power of two, and the last.

    A number of b bits has no 2^b + 1, and what is wrapped, clamped or cut is so at a power of two more often than not.
    Between two powers stands one more, odd, as they are.

    >>> places(9).tolist()
    [0, 1, 2, 3, 4, 5, 7, 8]
    """
    found = {0, length - 2, length - 1}
    for power in (2**k for k in range(length.bit_length())):
        found |= {power - 1, power, power + 1, power + power // 2 + 1 if power > 4 else 0}
    return torch.tensor(sorted(p for p in found if 0 <= p < length))


def frequencies(width: int, base: float, pairs: int | None = None) -> Tensor:
    """Return base^(-2i/width), i = 0 .. pairs - 1, float64; one for each pair of channels if `pairs` is None."""
    count = (width + 1) // 2 if pairs is None else pairs
    return base ** (-2 * torch.arange(count, dtype=torch.float64) / width)


def angle_bound(positions: Tensor, omega: Tensor, base: float) -> Tensor:
    """Bound the error `[P, I]` of the angles p omega that are computed in float32.

    A frequency exp(-log(base) 2i/d) has an exponent of at most log(base), so its relative error is at most
    (log(base) + 3) eps; the first is exactly 1, and its angle is rounded, at most, once: p eps.
    """
    relative = torch.full_like(omega, math.log(base) + 3)
    relative[0] = 1.0
    return positions.double()[:, None] * omega * relative * epsilon(torch.float32)


def laid_out(sines: Tensor, cosines: Tensor, layout: str, width: int) -> Iterator[Tensor]:
    """Yield the tables `[P, D]` that right code makes of sines and cosines `[P, ceil(D/2)]`.

    An even width has one. Of an odd one the last channel is a sine or a cosine without its partner, or 0.
    """
    half = width // 2
    nothing = torch.zeros_like(sines[:, :1])
    if layout == "interleaved":
        yield torch.stack([sines, cosines], dim=-1).flatten(1)[:, :width]
        if width % 2:
            yield torch.cat([torch.stack([sines, cosines], dim=-1)[:, :half].flatten(1), nothing], dim=-1)
        return
    yield torch.cat([sines, cosines], dim=-1)[:, :width] if width % 2 == 0 else torch.cat([sines, cosines[:, :half]], 1)
    if width % 2:
        yield torch.cat([sines[:, :half], cosines], dim=-1)
        yield torch.cat([sines[:, :half], cosines[:, :half], nothing], dim=-1)


def right_tables(
    positions: Tensor, width: int, base: float, layouts: tuple[str, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tables `[P, D]` that are right at these positions, float64, each with the bound of its angles' errors.

    The paper has even widths alone. With an odd one the frequencies of right code are those of the width itself, of the
    one above, which is then cut, or of the one below, which is then filled up.
    """
    for whole in (width,) if width % 2 == 0 else (width, width + 1, width - 1):
        omega = frequencies(whole, base, (width + 1) // 2)
        angles, bound = positions.double()[:, None] * omega, angle_bound(positions, omega, base)
        for layout in layouts:
            tables = laid_out(angles.sin(), angles.cos(), layout, width)
            yield from zip(tables, laid_out(bound, bound, layout, width), strict=True)


def turned(x: Tensor, angles: Tensor, layout: str, sign: float) -> Tensor:
    """Rotate the first channels of x `[..., P, K]` by angles `[P, I]`, in float64; the others pass through.

    Args:
        x: at most 2 I channels are rotated, in pairs.
        angles: one for each pair.
        layout: "halves" pairs channel i with i + I, "interleaved" 2i with 2i + 1.
        sign: 1 turns the first channel of a pair towards the second, -1 the other way.
    """
    count = 2 * angles.shape[-1]
    wide, cos, sin = x.double(), angles.cos(), sign * angles.sin()
    first, second = paired(wide[..., :count], layout)
    new = (first * cos - second * sin, first * sin + second * cos)
    both = torch.cat(new, dim=-1) if layout == "halves" else torch.stack(new, dim=-1).flatten(-2)
    return torch.cat([both, wide[..., count:]], dim=-1)


def paired(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the first and the second channels `[..., I]` of the pairs of x `[..., 2 I]`."""
    if layout == "halves":
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., 0::2], x[..., 1::2]
