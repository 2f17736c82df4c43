"""Which formula a rotary embedding follows: its rotation read off as a matrix, and the usual slips tried on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.angles import paired
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.sizes import DrawnConfig

_NEAR = (1, 2, 5, 100)
_GROWN = 70
"""Positions up to which a table that grows has grown once."""
_FAR = (77, 203, 357, 501)
"""Numbers of which bfloat16, with its eight bits, does not have all, at angles that half precision rounds by far."""


def rotation_cause(case: Case, problem: Violation | None = None) -> str | None:
    """Name the one wrong formula whose rotations are those of the subject; None where none or several are.

    Args:
        case: of the violation.
        problem: the violation; what is measured does not depend on it.
    """
    for config in sorted(
        {*case.bench.buildable(), case.config()}, key=lambda c: -c.d_head
    ):  # sizes that tell most first
        if told := _rotated_by(case, config):
            return told
    return None


def _rotated_by(case: Case, config: DrawnConfig) -> str | None:
    """Return the formula at one size; an empty sentence where it is the right one, None where none or several fit."""
    built = case.bench.pool.get(config, judged_dtypes(case.bench)[-1])
    width = built.config.d_head
    told = _index_for_position(case, built) or _begins_again(case, built) or _shrinks(case, built)
    if told is not None:
        return told
    seen = torch.stack([_matrix(case, built, p) for p in _NEAR])
    if not bool(seen.isfinite().all()):
        return None
    base = float(case.subject.fact("base", 10000.0))
    turned = int(case.subject.fact("rotary_dim", width))
    declared = case.subject.fact("layout")
    fits = [
        words
        for words, guess in _formulas(width, turned, built.config.d_model, base, _NEAR, declared)
        if float((guess - seen).abs().max()) <= 2e-3  # float32 angles at position 100 err by 2e-4
    ]
    return fits[0] if len(set(fits)) == 1 else None


def rounding_cause(case: Case, problem: Violation | None = None) -> str | None:
    """Say what is rounded before the angles are formed: in the subject's own dtype, or in half precision.

    Args:
        case: of the violation.
        problem: the violation; what is measured does not depend on it.
    """
    told = rotation_cause(case)
    if told and " rounded to " in told:
        return told
    turned = int(case.subject.fact("rotary_dim", case.config().d_head))
    base = float(case.subject.fact("base", 10000.0))
    for dtype, autocast in ((torch.bfloat16, False), (torch.float16, False), (torch.float32, True)):
        if told := _in_half_precision(case, dtype, autocast, turned, base):
            return told
    return None


def _matrix(case: Case, built: Built, position: int, index: int | None = None) -> Tensor:
    """Return the `[H, K, K]` maps of all heads at a position, as matrices that act on columns, float64."""
    width, heads = built.config.d_head, built.config.num_heads
    basis = torch.eye(width, dtype=built.dtype, device=case.bench.device).expand(1, heads, width, width).contiguous()
    if index is None:
        at = torch.full((width,), position, device=case.bench.device)
        return case.call(built, basis, at)[0].detach().double().cpu().transpose(1, 2)
    places = torch.arange(width, device=case.bench.device) + position
    return case.call(built, basis, places)[0].detach().double().cpu().transpose(1, 2)


def _index_for_position(case: Case, built: Built) -> str | None:
    """Whether the place in the sequence is used and not the given position, or the positions of the last call are."""
    width, heads = built.config.d_head, built.config.num_heads
    x = torch.randn(1, heads, 1, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = x.expand(1, heads, 6, width).contiguous().to(case.bench.device, built.dtype)
    if told := _kept_angles(case, built, x):
        return told
    same = case.call(built, x, torch.full((6,), 3, device=x.device)).detach()
    moved = case.call(built, x, torch.arange(6, device=x.device) + 4).detach()
    spread = float((same - same[:, :, :1]).abs().max())
    if spread > 1e-3:
        unread = float((same - moved).abs().max()) < 1e-5
        return (
            "the positions that are given are not read: a token turns by its index in the sequence"
            if unread
            else "tokens at one and the same position turn by different angles: the index in the sequence enters too"
        )
    return None


def _kept_angles(case: Case, built: Built, x: Tensor) -> str | None:
    """Say that a call turns by the angles of the call before, where those of a new model are other ones."""
    if case.subject.build is None:
        return None
    first, second = (case.bench.pool.fresh(built.config, x.dtype) for _ in range(2))
    low, high = (torch.arange(6, device=x.device) + start for start in (0, 9))
    before, alone = (case.call(model, x, at).detach() for model, at in ((first, low), (second, high)))
    after = case.call(first, x, high).detach()
    if torch.equal(before, alone) or not torch.equal(before, after):
        return None
    case.call(first, x[:, :, :5], low[:5])
    renewed = torch.equal(case.call(first, x, high).detach(), alone)
    when = "; it is made anew where their number has changed" if renewed else ""
    return (
        f"other positions of as many tokens are turned by the angles of the call before: a table is kept of them{when}"
    )


def _shrinks(case: Case, built: Built) -> str | None:
    """Say which pairs of channels are turned and made shorter, by a factor that changes with the position."""
    width = int(case.subject.fact("rotary_dim", built.config.d_head))
    for layout in [case.subject.fact("layout")] if case.subject.fact("layout") else ["halves", "interleaved"]:
        maps = torch.stack([_matrix(case, built, p)[0] for p in _NEAR])  # [P, K, K]
        one, two = paired(torch.arange(width), layout)
        cos, sin = maps[:, one, one], maps[:, two, one]
        others = torch.stack([maps[:, two, two] - cos, maps[:, one, two] + sin]).abs().amax()
        length = torch.hypot(cos, sin)
        if float(others) > 1e-4 or float(length.amax()) > 1 + 1e-4 or float(length.amin()) > 1 - 1e-3:
            continue
        short = [n for n in range(length.shape[1]) if float(length[:, n].amin()) < 1 - 1e-3]
        varies = float((length.amax(0) - length.amin(0))[short].amin()) > 1e-4
        if varies and bool((length[:, [n for n in range(length.shape[1]) if n not in short]] > 1 - 1e-3).all()):
            named = f"pair {short[0]} is" if len(short) == 1 else f"pairs {', '.join(map(str, short))} are"
            return (
                f"{named} turned and made shorter, by a factor that changes with the position: cosines and "
                "sines of two angles are mixed, where the angles are to be"
            )
    return None


def _begins_again(case: Case, built: Built) -> str | None:
    """Whether positions from some number on are rotated as those from 0 on: rows that a table grew by."""
    longest = min(int(case.subject.fact("max_len", _GROWN)), _GROWN)
    unit = torch.eye(built.config.d_head, dtype=torch.float64)
    if longest > 3 and all(float((_matrix(case, built, p) - unit).abs().max()) < 1e-6 for p in (1, 2, 3)):
        return f"heads of {built.config.d_head} channels are not rotated at all, at any position"
    for position in range(2, longest - 2):
        if float((_matrix(case, built, position) - unit).abs().max()) < 1e-6:
            same = [_matrix(case, built, p) - _matrix(case, built, position + p) for p in (1, 2)]
            if all(float(x.abs().max()) < 1e-6 for x in same):
                return f"from position {position} on angles are those of positions 0, 1, 2 ...: they begin again"
            return None
    return None


def _rotation(cosine: Tensor, sine: Tensor, sign: float, layout: str, slip: str = "") -> Tensor:
    """Return `[P, K, K]` matrices from angles' cosines and sines `[P, K]`, a number for each channel."""
    width = cosine.shape[-1]
    half = width // 2
    first = torch.arange(half) if layout == "halves" else torch.arange(0, width, 2)
    second = first + half if layout == "halves" else first + 1
    matrix = torch.diag_embed(cosine)
    matrix[:, first, second] = -sign * sine[:, first]
    matrix[:, second, first] = sign * sine[:, second] * (-1 if slip == "same sign" else 1)
    if slip == "one sided":
        matrix[:, second, first] = 0
    if slip == "second of first":
        matrix[:, second, first] = sign * sine[:, second] * cosine[:, first]
        matrix[:, second, second] = cosine[:, second] - sine[:, second] * sine[:, first]
    if slip == "first of second":
        matrix[:, first, second] = -sign * sine[:, first] * cosine[:, second]
        matrix[:, first, first] = cosine[:, first] - sine[:, first] * sine[:, second]
    return matrix


def _spread(angles: Tensor, layout: str) -> Tensor:
    """Give `[P, K/2]` angles to the channels `[P, K]`."""
    return torch.cat([angles, angles], -1) if layout == "halves" else angles.repeat_interleave(2, -1)


def _formulas(
    width: int, turned: int, d_model: int, base: float, positions: tuple[int, ...], declared: object
) -> Iterator[tuple[str, Tensor]]:
    """Yield words and `[P, 1, K, K]`; no words for what is right."""
    at = torch.tensor(positions, dtype=torch.float64)[:, None]
    pair = torch.arange(turned // 2, dtype=torch.float64)
    omega = base ** (-2 * pair / turned)
    layouts = ("halves", "interleaved")

    def whole(matrix: Tensor) -> Tensor:
        full = torch.eye(width, dtype=torch.float64).repeat(len(positions), 1, 1)
        full[:, : matrix.shape[-1], : matrix.shape[-1]] = matrix
        return full[:, None]

    for layout, sign in product(layouts, (1.0, -1.0)):
        other = layouts[1 - layouts.index(layout)]
        pairs = {"halves": "channels half the width apart", "interleaved": "neighbouring channels"}

        def turn(angles: Tensor, slip: str = "", layout: str = layout, sign: float = sign) -> Tensor:
            spread = _spread(angles, layout)
            return whole(_rotation(spread.cos(), spread.sin(), sign, layout, slip))

        swapped = declared in layouts and layout != declared
        told = f"channels are rotated in the layout {layout}, where {declared} is declared" if swapped else ""
        yield told, turn(at * omega)
        mixed = _spread(at * omega, other)
        yield (
            f"the layouts are mixed: {pairs[layout]} are rotated together, but the angles are laid out for {other}, "
            "so that the two channels of a pair turn by different angles",
            whole(_rotation(mixed.cos(), mixed.sin(), sign, layout)),
        )
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            yield f"the frequencies are rounded to {name}", turn(at * omega.to(dtype).double())
            yield f"the positions are rounded to {name}", turn(at.to(dtype).double() * omega)
            yield f"the angles are rounded to {name}", turn((at * omega).to(dtype).double())
        for offset in (1, -1):
            yield (
                f"positions are off by one: position p is rotated as {'p + 1' if offset == 1 else 'p - 1'}",
                turn((at + offset) * omega),
            )
        if turned < width:
            every = base ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
            yield f"all {width} channels are rotated, where rotary_dim={turned} is declared", turn(at * every)
            yield (
                f"the frequencies are those of all {width} channels, not of the {turned} that are rotated",
                turn(at * every[: turned // 2]),
            )
        for words, exponent in (
            ("base^(-i/K) instead of base^(-2i/K)", pair / turned),
            ("base^(-4i/K) instead of base^(-2i/K)", 4 * pair / turned),
            ("base^(-2i/d_model) instead of base^(-2i/K): the model's width stands for the head's", 2 * pair / d_model),
            ("base^(-2i/(K-2)): the ends are included", 2 * pair / max(turned - 2, 1)),
            ("base^(-2(i+1)/K): they start one too late", 2 * (pair + 1) / turned),
            ("base^(2i/K): the exponent has the wrong sign", -2 * pair / turned),
        ):
            yield f"the frequencies are {words}", turn(at * base**-exponent)
        for number in (100.0, 1000.0, 10000.0, 50000.0, 100000.0, 500000.0, 1000000.0):
            if abs(number - base) > 1:
                yield f"the base is {number:g} instead of {base:g}", turn(at * number ** (-2 * pair / turned))
        yield "angles are taken in degrees: they are too small by pi / 180", turn(at * omega * torch.pi / 180)
        yield "angles are multiplied by 2 pi", turn(at * omega * 2 * torch.pi)
        spread = _spread(at * omega, layout)
        yield "sine and cosine are exchanged", whole(_rotation(spread.sin(), spread.cos(), sign, layout))
        yield (
            "both channels of a pair get their sine with the same sign: that is no rotation",
            turn(at * omega, "same sign"),
        )
        yield "the sine of one channel of each pair is missing", turn(at * omega, "one sided")
        for one, two in (("first", "second"), ("second", "first")):
            yield (
                f"the {two} channel of each pair is made of the {one} one as it is rotated already: that was "
                "overwritten in place, not kept",
                turn(at * omega, f"{two} of {one}"),
            )
        if turned % 4 == 0:
            part = turned // 2
            few = base ** (-2 * torch.arange(part // 2, dtype=torch.float64) / part)
            told = f"only {part} of {turned} channels are rotated"
            yield told, turn(at * few)
            yield told, turn(at * omega[: part // 2])


def _in_half_precision(case: Case, dtype: torch.dtype, autocast: bool, turned: int, base: float) -> str | None:
    """Say what was rounded before the angles were formed, where a model in half precision is wrong."""
    built = case.bench.pool.get(case.config(), dtype)
    low = torch.bfloat16 if autocast else dtype
    name = "under bfloat16 autocast" if autocast else f"in {str(dtype).removeprefix('torch.')}"
    try:
        with torch.autocast(case.bench.device.type, dtype=torch.bfloat16, enabled=autocast):
            seen = torch.stack([_matrix(case, built, p) for p in _FAR])
    except Exception:  # a table that ends before, or a dtype that it refuses
        return None
    at = torch.tensor(_FAR, dtype=torch.float64)[:, None]
    omega = base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)

    def rounded(x: Tensor) -> Tensor:
        return x.to(low).double()

    angles = {
        "": at * omega,
        "positions and frequencies are rounded to it before their product, the angle, is formed": rounded(
            rounded(at) * rounded(omega)
        ),
        "positions are rounded to it before the angles are formed": rounded(at) * omega,
        "positions and frequencies are rounded to it, and the angle not": rounded(at) * rounded(omega),
        "the frequencies are rounded to it before the angles are formed": at * rounded(omega),
        "the angles are rounded to it before their sine and cosine are taken": rounded(at * omega),
        "positions are rounded to it, and so are the angles": rounded(rounded(at) * omega),
        "the frequencies are rounded to it, and so are the angles": rounded(at * rounded(omega)),
    }
    limit = 8 * torch.finfo(low).eps
    fits = set()
    for words, angle in angles.items():
        layouts = ("halves", "interleaved")
        for layout, laid, sign in product(layouts, layouts, (1.0, -1.0)):
            spread = _spread(angle, laid)
            full = torch.eye(seen.shape[-1], dtype=torch.float64).repeat(len(_FAR), 1, 1)
            full[:, :turned, :turned] = _rotation(spread.cos(), spread.sin(), sign, layout)
            if float((full[:, None] - seen).abs().max()) <= limit:
                fits.add(words)
    if not fits or "" in fits:
        return None
    what = min(fits, key=len) if len(fits) == 1 else None
    at_most = float((angles[what] - angles[""]).abs().max()) if what else 0.0
    return (
        f"{name} {what}: they are off by up to {at_most:.2g} radians at positions up to {max(_FAR)}" if what else None
    )
