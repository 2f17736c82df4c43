"""Positions far out, at the widths of real models, and in the numbers that a model counts in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.measured import given_dtype
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.angles import (
    angle_bound,
    frequencies,
    paired,
    places,
    right_tables,
    turned,
)
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.precision import angles_in_half
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.property import holds
from veriformer.properties.families.far_buckets import buckets_begin_as_published, settled
from veriformer.properties.families.positions_asked import Counting, asked, claimed, countings, made, sized, widened
from veriformer.properties.formulas.angle_sums import angle_sum_cause
from veriformer.properties.formulas.counting import all_rows_differ, counting_cause, distance_cause, row_cause
from veriformer.properties.formulas.moved_rows import moved_rows
from veriformer.properties.formulas.relative_biases import is_geometric, slope_cause, slopes_by
from veriformer.properties.subject.subject import Subject

_WIDE = (64, 128, 96, 256, 512, 1024)
_ODD = (7, 33, 5, 65, 127, 3, 511)
_HEADS = (12, 20, 9, 40)
_FEW_HEADS = (5, 7, 16, 32)
"""Numbers that the palette does not have, most of them no power of two."""
_NUMBERS = {"quick": 2**16, "standard": 2**19, "thorough": 2**21}
"""Numbers of the largest table that is asked for, by profile: a narrow one is long, a wide one short."""
_ROTATED = {"quick": 2**20, "standard": 2**22, "thorough": 2**24}
"""As many positions times channels for a rotation: one that keeps no table could reach any, one that does is slow."""
_SQUARE = {"quick": 300, "standard": 700, "thorough": 2100}
"""Length of the bias `[H, T, T]` that is asked for, beyond 256; in the profile thorough beyond 2048."""
_ANSWER = ("half_precision", False)


def _has_a_formula(subject: Subject) -> str | None:
    formulas = {"positions": ("sinusoidal", "learned"), "position_bias": ("alibi", "t5")}.get(subject.kind)
    how = subject.fact("positions")
    if formulas and how not in formulas:
        return (
            f"speaks of positions that are {' or '.join(formulas)}; here they are {how or 'neither declared nor known'}"
        )
    if how == "t5" and subject.fact("bidirectional") is None:
        return "the fact 'bidirectional' is neither declared nor known"
    return None


@holds(
    "positions.far",
    statement="Far out, at any width and in whatever numbers the model counts, positions are right: no two coincide.",
    formula="|f_u(p) - f(p)| <= p omega_i (log(base) + 3) 2^-23 + c u, p < max_len, d <= 1024, u = 2^-24 .. 2^-8",
    source="Vaswani et al. 2017, 3.5; Su et al. 2021; Press et al. 2022; Higham 2002, 2.1: b bits count to 2^b.",
    kinds=("positions", "rotary", "position_bias"),
    level="extended",
    requires=("sinusoidal.definition", "rotary.frequencies", "alibi.slopes", "t5.buckets", "learned.table"),
    unless=_has_a_formula,
    examples_factor=0.4,
)
def far_positions_are_right(case: Case) -> None:
    """Held to the closed form in float64 at the positions around every power of two up to the claimed length (to 10^6
    where any works), at widths of 64 to 1024, odd ones, and numbers of heads that are no power of two. Angles of
    float32 may err by p omega (log(base) + 3) eps. bfloat16 has no 257, float16 no 2049: a model that counts in them,
    or is made to by autocast, lets positions coincide; one that rounds its table alone does not. A size, length or
    dtype that is refused is not judged.
    """
    check = {"positions": _tables, "rotary": _rotations, "position_bias": _biases}[case.subject.kind]
    check(case)
    if not case.bench.tally.witnesses:
        case.does_not_apply("it refuses the sizes and lengths that are asked for")


def _tables(case: Case) -> None:
    if case.subject.fact("positions") == "learned":
        _learned(case)
        return
    numbers, own = _NUMBERS[case.bench.settings.profile], given_dtype(case.bench)
    wide, odd = case.choice("wide", _WIDE), case.choice("odd", _ODD)
    for width in (wide, odd, 8):
        length = max(300, min(numbers // width, 10**6))
        config = sized(case, d_model=width, num_heads=1, max_len=length)
        _judge_table(case, made(case, config, own), claimed(case, config, length))
    config = sized(case, d_model=8, num_heads=1, max_len=2100)
    for counting, built in countings(case, config):
        _judge_table(case, built, claimed(case, config, 2100), counting)


def _judge_table(case: Case, built: Built | None, length: int, counting: Counting | None = None) -> None:
    """Hold one table against the closed form."""
    table = asked(case, built, length, counting=counting)
    if table is None or table.ndim != 2 or table.shape[0] != length or built is None:
        return
    width, base = table.shape[1], float(case.subject.fact("base", 10000.0))
    if built.config.d_model % 2 and case.subject.build and width != built.config.d_model:
        return  # it makes no odd width
    declared = case.subject.fact("layout")
    offset = int(case.subject.fact("position_offset", 0))
    at = places(length)
    rows = table[at].double()
    # sine and cosine of float32 are rounded once and may err by one more unit; the table's own dtype rounds once, and
    # once more where it was a buffer of another dtype
    rounding = 2 * epsilon(torch.float32) + epsilon(table.dtype)
    rounding = max(rounding, 2 * epsilon(counting.dtype)) if counting else rounding
    right = [
        (expected, bound + rounding)
        for expected, bound in right_tables(
            at + offset, width, base, (str(declared),) if declared else ("interleaved", "halves")
        )
    ]
    expected, bound = min(right, key=lambda one: (int(((rows - one[0]).abs() > one[1]).sum()), _worst(rows, *one)))
    how = f" {counting}" if counting else ""
    case.close(
        rows,
        expected,
        f"at a width of {width} and {length} positions the table is not that of the formula{how}",
        bound=bound,
        constants_allowed=True,
        asks=_ANSWER if counting else None,
        cause=lambda: (
            _moved(table, base, declared, offset) or _table_cause(rows, expected, bound, at + offset, base, declared)
        ),
    )
    case.witness()


def _moved(table: Tensor, base: float, declared: Any, offset: int) -> str | None:
    """Say from which position on rows are those of others."""
    layouts = (str(declared),) if declared else ("interleaved", "halves")
    return next((told for layout in layouts if (told := moved_rows(table, base, layout, offset))), None)


def _worst(rows: Tensor, expected: Tensor, bound: Tensor) -> float:
    error = (rows - expected).abs() / bound
    return float(torch.where(error.isfinite(), error, torch.inf).amax())


def _table_cause(
    rows: Tensor, expected: Tensor, bound: Tensor, positions: Tensor, base: float, declared: Any
) -> str | None:
    width = rows.shape[1]
    if width % 2:
        wrong = ((rows - expected).abs() > bound).any(dim=0)
        if not bool(wrong[:-1].any()):
            return f"all columns are right but the last, which has no partner in an odd width ({width})"
        return None
    layouts = (str(declared),) if declared else ("interleaved", "halves")
    told = [angle_sum_cause(*paired(rows, layout), positions, base, float(bound.amax())) for layout in layouts] + [
        counting_cause(*paired(rows, layout), positions, width, base, paired(bound, layout)[0]) for layout in layouts
    ]
    return next((cause for cause in told if cause), None)


def _learned(case: Case) -> None:
    """Hold a learned table of few bits against the same one in float64: every row its own, the last reached."""
    longest = 2100 if case.bench.settings.profile == "thorough" else 600
    config = sized(case, d_model=8, num_heads=1, max_len=longest)
    length = claimed(case, config, longest)
    built = made(case, config, given_dtype(case.bench))
    table = asked(case, built, length)
    if table is None or built is None or not built.is_fresh or not _is_trained(built.module):
        case.does_not_apply(
            "its rows are not known to differ, since they are given or frozen, or the length is refused"
        )
    _rows_differ(case, table, length)
    for counting, low in countings(case, config):
        got = asked(case, low, length, counting=counting)
        exact = asked(case, widened(case, low), length)
        if got is None or exact is None:
            continue
        _same_rows(case, got, exact, counting, f"the {length} rows of the table are others")
    case.witness()


def _is_trained(module: Any) -> bool:
    return isinstance(module, nn.Module) and all(p.requires_grad for p in module.parameters())


def _rows_differ(case: Case, table: Tensor, length: int) -> None:
    case.require(
        case.apply(all_rows_differ, table),
        "two positions below the claimed length have the same row",
        got=f"{len(torch.unique(table, dim=0))} different rows",
        expected=f"{length}",
        cause=lambda: row_cause(table),
    )


def _same_rows(case: Case, got: Tensor, exact: Tensor, counting: Counting, what: str) -> None:
    # what is looked up is rounded no more than once; eight units leave room for a scale or a norm behind it
    bound = 8 * epsilon(counting.dtype) * exact.double().abs().amax()
    case.close(
        got.double(),
        exact.double(),
        f"{counting} {what} than those of the same weights in float64",
        bound=float(bound),
        constants_allowed=True,
        asks=_ANSWER,
        cause=lambda: row_cause(got) if got.ndim == 2 else None,
    )


def _rotations(case: Case) -> None:
    budget, own = _ROTATED[case.bench.settings.profile], given_dtype(case.bench)
    near = _pairing(case)
    if near is None:
        case.does_not_apply(
            "positions below 64 are refused, or not rotated as its base has it, which rotary.frequencies judges"
        )
    partial = case.subject.fact("rotary_dim") is not None and case.subject.is_functional
    wide, other = case.choice("wide", _WIDE), case.choice("other", (80, 6, 48, 112, 10, 32))
    for width in (wide, other, 8):
        length = min(budget // width, 10**6) if width > 8 else 10**6
        longest = _claims(case, length)
        config = case.config() if partial else sized(case, d_model=2 * width, num_heads=2, max_len=longest)
        length = length if config.d_head == width else min(budget // config.d_head, 10**6)
        _judge_rotations(case, made(case, config, own), length, near)
    config = case.config() if partial else sized(case, d_model=32, num_heads=2, max_len=8192)
    for counting, built in countings(case, config):
        _judge_rotations(case, built, 8192, near, counting)


def _claims(case: Case, length: int) -> int:
    """Return for how many positions a rotation is built: 8192, or the claimed number up to a length."""
    return max(8192, min(int(case.subject.fact("max_len", 0)), length))


def _judge_rotations(
    case: Case, built: Built | None, wanted: int, near: tuple[str, float], counting: Counting | None = None
) -> None:
    """Ask for as many positions as the subject takes: any, as of all rotations, unless a length is declared."""
    longest = claimed(case, built.config, wanted) if built and case.subject.fact("max_len") else wanted
    for length in sorted({min(longest, n) for n in (longest, 8192, 4096, 512, 64)}, reverse=True):
        if _judge_rotation(case, built, length, near, counting):
            return


_NEAR = 60
"""Position at which, beside smaller ones, it is told how a rotation pairs channels."""


def _pairing(case: Case) -> tuple[str, float] | None:
    """Return the layout and the sign of the rotation at small positions; None where it is neither, or of another base.

    Seen at the widest head of the palette: of one pair every base is right.
    """
    config = max(case.bench.configs, key=lambda c: c.d_head)
    built = case.bench.pool.get(config, given_dtype(case.bench))
    if config.max_len <= _NEAR and case.subject.build is not None:
        built = made(case, replace(config, max_len=_NEAR + 1), built.dtype) or built
    at = torch.tensor([1, 2, 5, _NEAR])
    x = case.normal(1, config.num_heads, len(at), config.d_head, dtype=built.dtype)
    rotated = asked(case, built, x, at.to(x.device))
    if rotated is None:
        return None
    got = rotated.double()
    declared = case.subject.fact("layout")
    found = {}
    for layout in (str(declared),) if declared else ("halves", "interleaved"):
        for sign in (1.0, -1.0):
            expected, bound = _turned(case, x.cpu(), at, layout, sign, epsilon(built.dtype))
            found[layout, sign] = _worst(got, expected, bound)
    best = min(found, key=lambda one: found[one])
    return best if found[best] <= 1 else None


def _turned(case: Case, x: Tensor, at: Tensor, layout: str, sign: float, unit: float) -> tuple[Tensor, Tensor]:
    """Return x `[1, H, P, K]` rotated to positions, and the bound of its error, both of that shape."""
    width, base = x.shape[-1], float(case.subject.fact("base", 10000.0))
    channels = int(case.subject.fact("rotary_dim", width))
    omega = frequencies(channels, base, channels // 2)
    first, second = paired(x.double()[..., :channels], layout)
    # an angle's error moves a pair by as much times its length; sine, cosine, two products and a sum round in the dtype
    error = torch.hypot(first, second) * (angle_bound(at, omega, base) + 8 * unit + 8 * epsilon(torch.float32))
    both = torch.cat([error, error], -1) if layout == "halves" else torch.stack([error, error], -1).flatten(-2)
    rest = (x.double()[..., channels:].abs() + 1e-3) * 8 * unit
    return turned(x, at.double()[:, None] * omega, layout, sign), torch.cat([both + 1e-3 * unit, rest], dim=-1)


def _judge_rotation(
    case: Case, built: Built | None, length: int, near: tuple[str, float], counting: Counting | None = None
) -> bool:
    """Hold the rotation of one model to the closed form; False where it refuses."""
    if built is None:
        return False
    at, (layout, sign) = places(length), near
    x = case.normal(1, built.config.num_heads, len(at), built.config.d_head, dtype=built.dtype)
    got = asked(case, built, x, at.to(x.device), counting=counting)
    if got is None or got.shape != x.shape:
        return False
    unit = epsilon(counting.dtype) if counting else epsilon(built.dtype)
    expected, bound = _turned(case, x.cpu(), at, layout, sign, unit)
    width = x.shape[-1]

    def narrowed() -> str | None:
        with off_the_record(case):
            return (
                angles_in_half(lambda: asked(case, built, x, at.to(x.device), counting=counting)) if counting else None
            )

    case.close(
        got.double(),
        expected,
        f"of {width} channels at positions up to {length - 1}, the rotation is not that of the formula"
        + (f" {counting}" if counting else ""),
        bound=bound,
        asks=_ANSWER if counting else None,
        cause=lambda: "; ".join(
            filter(None, (_rotation_cause(case, x.cpu(), got, at, layout, sign, bound), narrowed()))
        ),
    )
    case.witness()
    return True


def _rotation_cause(
    case: Case, x: Tensor, got: Tensor, at: Tensor, layout: str, sign: float, bound: Tensor
) -> str | None:
    """Read sines and cosines off the first head: those of the angle between a pair and what became of it."""
    width = int(case.subject.fact("rotary_dim", x.shape[-1]))
    a, b = paired(x[0, 0, :, :width].double(), layout)
    c, d = paired(got[0, 0, :, :width].double(), layout)
    square = a * a + b * b
    allowed = paired(bound[0, 0, :, :width], layout)[0] / square.sqrt()
    base = float(case.subject.fact("base", 10000.0))
    return counting_cause(sign * (a * d - b * c) / square, (a * c + b * d) / square, at, width, base, 2 * allowed)


def _biases(case: Case) -> None:
    length, own = _SQUARE[case.bench.settings.profile], given_dtype(case.bench)
    config = sized(case, d_model=16, num_heads=2, max_len=length)
    length = claimed(case, config, length)
    if case.subject.fact("positions") == "t5":
        config = sized(case, d_model=24, num_heads=3, max_len=length)
        length = claimed(case, config, max(length, min(2 * int(case.subject.fact("max_distance", 128)), 1100)))
        buckets_begin_as_published(case, made(case, config, own), length)
    else:
        for heads in (case.choice("heads", _HEADS), case.choice("few", _FEW_HEADS)):
            many = sized(case, d_model=8 * heads, num_heads=heads, max_len=40)
            _judge_slopes(case, made(case, many, own), claimed(case, many, 40))
        _judge_slopes(case, made(case, config, own), length)
    for counting, built in countings(case, config):
        if case.subject.fact("positions") == "alibi":
            _judge_slopes(case, built, length, counting)
            continue
        got, exact = (
            asked(case, built, length, length, counting=counting),
            asked(case, widened(case, built), length, length),
        )
        if got is not None and exact is not None and got.shape == exact.shape:
            rows = places(length)
            got, exact = got[:, rows], exact[:, rows]
            sure = torch.stack([settled(case, torch.arange(length) - int(at)) for at in rows])
            where = sure.expand_as(got)
            _same_rows(case, torch.where(where, got, 0), torch.where(where, exact, 0), counting, "the bias is another")


def _judge_slopes(case: Case, built: Built | None, length: int, counting: Counting | None = None) -> None:
    """Hold ALiBi's bias of the past to minus slope times distance, up to a constant a row."""
    bias = asked(case, built, length, length, counting=counting)
    if bias is None or built is None or bias.ndim != 3 or bias.shape[1:] != (length, length):
        return
    rows = places(length)
    past = torch.arange(length) <= rows[:, None]
    here = bias[:, rows].double()
    own = here.gather(2, rows[None, :, None].expand(len(here), -1, 1))
    slopes = slopes_by(case.subject.fact("slopes"), bias.shape[0])
    expected = -slopes[:, None, None] * (rows[:, None] - torch.arange(length)).double()
    got = torch.where(past, here - own, 0)
    seen = got[:, -1, -2] - got[:, -1, -3]
    # slope, distance and their product are rounded once each, with the constant of the row once more
    unit = max(epsilon(bias.dtype), epsilon(counting.dtype if counting else built.dtype))
    bound = 4 * unit * (expected.abs() + own.abs()) + 1e-9
    case.close(
        got,
        torch.where(past, expected, 0),
        f"with {len(slopes)} heads and {length} positions the bias is not that of the published slopes"
        + (f" {counting}" if counting else ""),
        bound=bound,
        asks=_ANSWER if counting else ("slopes", "geometric") if is_geometric(seen) else None,
        cause=lambda: (
            distance_cause(got, slopes, rows, counting.dtype, bound) if counting else slope_cause(seen, slopes)
        ),
    )
    case.witness()
