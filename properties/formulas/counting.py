"""How positions are counted wrongly: rounded, wrapped, clamped, or with the frequencies of another width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veriformer.properties.definitions.angles import frequencies

_HALF = (torch.bfloat16, torch.float16)


def _counts(positions: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong ways to count, and the positions `[P]` as they are counted so."""
    exact = positions.double()
    for dtype, last in ((torch.bfloat16, 256), (torch.float16, 2048)):
        name = str(dtype).removeprefix("torch.")
        yield f"positions are counted in {name}, which has no {last + 1}", exact.to(dtype).double()
    for power in (2**k for k in range(5, 21)):
        if power <= int(positions.max()):
            yield f"positions wrap around: {power} is counted as 0", exact % power
            yield f"positions end: {power} and what lies beyond are counted as {power - 1}", exact.clamp(max=power - 1)


def _wrong_angles(positions: Tensor, width: int, base: float, pairs: int) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong angles `[P, I]` in words."""
    omega, exact = frequencies(width, base, pairs), positions.double()[:, None]
    for words, counted in _counts(positions):
        yield words, counted[:, None] * omega
    for dtype in _HALF:
        name = str(dtype).removeprefix("torch.")
        few = omega.to(dtype).double()
        yield f"the frequencies are rounded to {name}", exact * few
        yield f"the angles are rounded to {name}", (exact * omega).to(dtype).double()
        counted = exact.to(dtype).double()
        for words, angles in (
            ("positions and frequencies are", counted * few),
            ("positions, frequencies and angles are", (counted * few).to(dtype).double()),
            ("positions and angles are", (counted * omega).to(dtype).double()),
        ):
            yield f"{words} rounded to {name}, which counts to {256 if dtype == torch.bfloat16 else 2048}", angles
    for other in sorted({2 ** (width - 1).bit_length(), 2 * width, width // 2, width + 2, width - 2, 32, 64, 128, 256}):
        if other > 2 and other != width:
            told = f"the frequencies are those of a width of {other}: base^(-2i/{other}) instead of base^(-2i/{width})"
            yield told, exact * frequencies(other, base, pairs)


def counting_cause(
    sines: Tensor, cosines: Tensor, positions: Tensor, width: int, base: float, allowed: Tensor
) -> str | None:
    """Name the one wrong count, or the frequencies, that give sines and cosines; else the pairs that are wrong.

    Args:
        sines: `[P, I]`, as seen.
        cosines: `[P, I]`, as seen.
        positions: `[P]`.
        width: of the frequencies.
        base: of the frequencies.
        allowed: `[P, I]`: what rounding may do.
    """

    def far_off(angles: Tensor) -> Tensor:
        error = torch.maximum((angles.sin() - sines).abs(), (angles.cos() - cosines).abs())
        return torch.where(error.isfinite(), error, torch.inf) > 2 * allowed

    pairs = sines.shape[1]
    right = positions.double()[:, None] * frequencies(width, base, pairs)
    fits = {
        words: angles for words, angles in _wrong_angles(positions, width, base, pairs) if not far_off(angles).any()
    }
    if fits:  # rounding what a position of few bits is anyway changes nothing: the shortest account is the whole of it
        return min(fits, key=len)
    wrong = far_off(right)
    off = wrong.any(dim=0).nonzero().flatten().tolist()
    if 0 < len(off) <= max(1, pairs // 2):
        omega = frequencies(width, base, pairs)
        which = ", ".join(f"{i} (base^(-{2 * i}/{width}) = {float(omega[i]):.3g})" for i in off[:3])
        more = f" and {len(off) - 3} more" if len(off) > 3 else ""
        return f"of {pairs} frequencies, counted from 0, these alone are wrong: {which}{more}"
    first = wrong.any(dim=1).nonzero().flatten().tolist()
    if first and int(positions[first[0]]) > 1:
        at = int(positions[first[0]])
        return f"all is right at the positions up to {int(positions[first[0] - 1])} that were tried, wrong from {at} on"
    return None


def row_cause(table: Tensor) -> str | None:
    """Say where the first row stands that was there before; None if every row is new."""
    same = (table[:, None] == table[None]).all(dim=-1).tril(-1)
    if not bool(same.any()):
        return None
    later, earlier = (int(i) for i in same.nonzero()[0])
    rest = table[later:]
    if later + len(rest) == len(table) and torch.equal(rest, table[earlier : earlier + len(rest)]):
        return f"positions wrap around: from {later} on the rows of {earlier} on come again"
    if bool((rest == table[later]).all()):
        return f"positions end: all from {earlier} on have one row"
    return f"position {later} has the row of {earlier}"


def all_rows_differ(table: Tensor) -> Tensor:
    """Return whether no two rows are equal."""
    return torch.tensor(len(torch.unique(table, dim=0)) == len(table))


def distance_cause(bias: Tensor, slopes: Tensor, rows: Tensor, dtype: torch.dtype, allowed: Tensor) -> str | None:
    """Say whether positions were rounded before they were subtracted.

    Args:
        bias: `[H, R, S]` of the past, less a constant a row.
        slopes: `[H]`.
        rows: `[R]`: positions of the queries.
        dtype: that they may be rounded to.
        allowed: `[H, R, S]`: what rounding may do.
    """
    keys = torch.arange(bias.shape[2])
    few = (rows.to(dtype).double()[:, None] - keys.to(dtype).double()).abs()
    guess = torch.where(keys <= rows[:, None], -slopes[:, None, None] * few, 0)
    if bool(((bias - guess).abs() > 2 * allowed).any()):
        return None
    return f"positions are rounded to {str(dtype).removeprefix('torch.')} before they are subtracted"
