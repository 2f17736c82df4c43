"""Softmax of long rows: across the blocks of a kernel, with what is largest and what is hidden at every place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import CostWatch
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.attention import softmax_of_long_rows, softmax_oracle
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.hidden_blocks import hidden_block_cause
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.families.softmax_axes import softmaxed
from veriformer.properties.families.softmax_fillers import other_maximum_cause, streamed_rows_cause

LENGTHS = (10, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097)
"""One entry more than the usual blocks; a row is judged at all of them, and the shortest that fails is told."""

_LOOP = 64
"""Operations for 512 entries: more than those of a block each of 64 entries or more."""

LONGEST = 100_000
"""A vocabulary's width, and more than any block."""

ROWS = (
    "of ordinary scores",
    "whose largest score stands first",
    "whose largest score stands in the middle",
    "whose largest score stands last",
    "whose first half is hidden",
    "whose last half is hidden",
    "with a hidden score in every block",
    "whose scores rise",
    "whose scores fall",
    "of equal scores",
    "with all scores but one hidden",
    "with large scores in every block",
)
_DERIVED = (0, 3, 4, 6, 11)
"""Kinds of rows whose gradient is compared."""

_BLOCK = 16
"""The smallest block that is thought of: what stands in each of these stands in every larger block."""

_MANY_ROWS = 1030
"""More than the programs of a grid that somebody took for enough, and no whole number of blocks."""

_OTHER_AXES = {3: (3, 4), 4: (2, 3, 2), 5: (2, 1, 3, 2)}
_FEW_AXES = {3: (1, 2), 4: (1, 2, 1), 5: (1, 1, 2, 1)}
_HALVES = (torch.float16, torch.bfloat16)
_IN_HALF = (513, 4097)
"""A sum in bfloat16 stops growing at 256, one in float16 at 2048; a sum of longer rows passes 65504, its largest."""


def placed(ordinary: Tensor, peak: float, at: int, kinds: Sequence[int] = range(len(ROWS))) -> Tensor:
    """Return rows of scores `[R, S]`.

    Args:
        ordinary: `[R, S]`.
        peak: what is large.
        at: 0 to 15: the place in every block of 16; and sixteenths of the row for what stands alone.
        kinds: of each row, its place in `ROWS`.
    """
    x = ordinary.clone()
    for row, kind in zip(x, kinds, strict=True):
        _place(row, kind, peak, at)
    return x


def _place(row: Tensor, kind: int, peak: float, at: int) -> None:
    width = row.shape[0]
    in_each = slice(min(at, width - 1), None, _BLOCK)
    if kind in (1, 2, 3):
        row[(0, width // 2, width - 1)[kind - 1]] = peak
    elif kind == 4:
        row[: width // 2] = -torch.inf
    elif kind == 5:
        row[width // 2 + 1 :] = -torch.inf
    elif kind == 6:
        row[in_each] = -torch.inf
    elif kind in (7, 8):
        ends = (0.0, peak) if kind == 7 else (peak, 0.0)
        row += torch.linspace(*ends, width, dtype=torch.float64, device=row.device).to(row.dtype)
    elif kind == 9:
        row[:] = 0.5
    elif kind == 10:
        lone = at * (width - 1) // (_BLOCK - 1)
        row[:lone] = -torch.inf
        row[lone + 1 :] = -torch.inf
    elif kind == 11:
        row[in_each] += peak


@holds(
    "softmax.long-rows",
    statement="Rows of any length have the float64 weights, wherever their largest and their hidden entries stand.",
    formula="|w - w_float64| <= w ((|x - max| + |max| + 2 log S + 4) eps + S eps), 10 <= S <= 100000",
    source="Definition; Higham 2002, section 4.2; block by block: Milakov & Gimelshein 2018, algorithm 3.",
    kinds=("softmax",),
    unless=excludes_fact("sink"),
    examples_factor=0.6,
    catches=("SM04", "SM05", "SM08"),
)
def every_block_counts(case: Case) -> None:
    """A kernel takes a long row in blocks: each must enter the maximum and the sum, the last one where it is not full,
    and one that is hidden throughout must leave no NaN. A softmax that refuses long rows with an error is held to those
    that it takes, one whose memory grows with the square of a row's length to 4097 entries.
    """
    built = case.built()
    axes = case.choice("axes", (3, 4, 5))
    dim = case.choice("dim", (-1, *range(axes - 1)) if case.subject.accepts("dim") else (-1,))
    peak = case.choice("peak", (80.0, 20.0, 1e3, 1e4))
    at = case.integer("at", 0, _BLOCK - 1)
    one = case.integer("row", 0, len(ROWS) - 1)
    ordinary = case.normal(len(ROWS), LENGTHS[-1], dtype=built.dtype)
    taken = 0
    for width in LENGTHS:
        if not _weights(case, built, placed(ordinary[:, :width], peak, at), _OTHER_AXES[axes], dim, taken):
            break
        taken = width
    if not taken:
        case.reject("the subject does not take such rows")
    longest = _longest(case, built) if taken == LENGTHS[-1] and built.dtype not in _HALVES else 0
    if longest:
        kinds = (one, 7)
        repeated = ordinary[:2].repeat(1, longest // LENGTHS[-1] + 1)[:, :longest]
        longer = placed(repeated, peak, at, kinds)
        _weights(case, built, longer, _FEW_AXES[axes], dim, taken, kinds)
    if taken == LENGTHS[-1] and not case.bench.settings.dtypes:
        _in_half_precision(case, built, peak, at)
    for width in (case.choice("S", (17, 65, 257)), taken):
        _gradient(case, built, placed(ordinary[: len(_DERIVED), :width], peak, at, _DERIVED))
    many = ordinary.flatten()[: _MANY_ROWS * 9].reshape(_MANY_ROWS, 9)
    if _weights(case, built, many, (_MANY_ROWS,), -1, 0, ()):
        _gradient(case, built, many)
    case.witness()


def one_maximum_for_all(case: Case, built: Built) -> str | None:
    """Tell whether a row is wrong beside one of far larger scores and right alone: one maximum for all rows.

    Args:
        case: of the failure.
        built: the softmax.
    """
    small = torch.tensor([[0.0, 1.0, -1.0]], dtype=built.dtype)
    large = 1.2 * math.log(float(torch.finfo(built.dtype).max))
    right = small.double().softmax(-1)
    alone, beside = softmaxed(case, built, small), softmaxed(case, built, torch.cat([small, small + large]))[:1]
    off = [float((x.cpu().double() - right).abs().nan_to_num(nan=1.0).amax()) for x in (alone, beside)]
    if off[0] < 1e-2 < off[1]:
        return "a row beside one of larger scores is wrong, and right alone: one maximum is subtracted from all rows"
    return None


def _weights(
    case: Case,
    built: Built,
    rows: Tensor,
    others: tuple[int, ...],
    dim: int,
    right: int,
    kinds: Sequence[int] = range(len(ROWS)),
) -> bool:
    """Compare the weights of rows `[R, S]` along an axis; return whether the subject takes them.

    Args:
        case: of the property.
        built: model.
        rows: of scores.
        others: sizes of the other axes, R in all.
        dim: place of the axis.
        right: the length below at which the weights were right; 0 if there is none.
        kinds: of the rows; none where they are ordinary ones.
    """
    width = rows.shape[-1]
    of = f"{len(rows)} rows" if not kinds else "rows"
    scores = rows.reshape(*others, width).movedim(-1, dim).contiguous()
    try:
        got = softmaxed(case, built, scores, dim)
    except SubjectError:
        return False
    exact, bound = case.apply(softmax_of_long_rows, rows, rows.dtype)
    half = rows.dtype in _HALVES
    case.close(
        got.movedim(dim, -1).reshape(rows.shape),
        exact.to(got.device),
        f"in {of} of {width} scores{_in(rows.dtype)} a weight is not that of float64",
        bound=bound,
        constants_allowed=True,
        cause=lambda: _cause(case, built, rows.dtype, right, width, kinds) if kinds else _rows_cause(case, built, rows),
        asks=("half_precision", False) if half else None,
    )
    return True


def _in(dtype: torch.dtype) -> str:
    return f" in {str(dtype).removeprefix('torch.')}" if dtype in _HALVES else ""


def _in_half_precision(case: Case, built: Built, peak: float, at: int) -> None:
    """Compare rows whose sum sticks where it is kept in half precision: a softmax may refuse these dtypes."""
    if case.subject.fact("half_precision") is False:
        return
    dtype = getattr(torch, case.choice("format", ("bfloat16", "float16")))
    kinds, ordinary = (0, 9, 11), case.normal(3, _IN_HALF[-1], dtype=dtype)
    right = 0
    for width in _IN_HALF:
        rows = placed(ordinary[:, :width], peak, at, kinds)
        if not _weights(case, built, rows, (3,), -1, right, kinds):
            return
        right = width
    if dtype == torch.bfloat16:  # in float16 e / S^2 of a row of thousands underflows, and rightly
        _gradient_in_half(case, built, dtype)


def _gradient(case: Case, built: Built, rows: Tensor) -> None:
    """Compare the gradient of a random sum of the weights.

    With r_j the error of w_j, the gradient w_j (g_j - s), s = sum w g, errs by r_j (|g_j| + |s|), and by w_j times the
    error of s; where the maximum is not detached, or is that of a block, what remains of its gradient, which is 0, are
    the errors of the row's others: their sum bounds each entry. Twice, for what is of second order.
    """
    leaf = rows.detach().clone().requires_grad_()
    probe = case.normal(*rows.shape, dtype=rows.dtype) + 2  # whose mean under any weights is far from 0
    try:
        weights = softmaxed(case, built, leaf)
        if not weights.requires_grad:
            return
        (got,) = torch.autograd.grad((weights * probe).sum(), leaf)
    except (SubjectError, RuntimeError):  # it is written for inference, or says that it has no such gradient
        return
    exact, bound = case.apply(softmax_of_long_rows, rows, rows.dtype)
    wide, width = probe.double(), rows.shape[-1]
    mean = (exact * wide).sum(-1, keepdim=True)
    summing = width * epsilon(rows.dtype) * (exact * wide.abs()).sum(-1, keepdim=True)
    error = (bound * (wide.abs() + mean.abs())).sum(-1, keepdim=True)
    case.close(
        got,
        (exact * (wide - mean)).to(got.device),
        f"the gradient of {len(rows)} rows of {width} scores is not that of softmax",
        bound=(2 * (error + summing)).expand_as(got),
        asks=("half_precision", False) if rows.dtype in _HALVES else None,
        cause=lambda: (
            _gradient_cause(case, built, rows.dtype, width)
            if len(rows) < _MANY_ROWS
            else _rows_cause(case, built, rows, probe)
        ),
    )


def _gradient_in_half(case: Case, built: Built, dtype: torch.dtype) -> None:
    """Compare the gradient of a row of nearly equal scores along what it is multiplied with, 1 and 3 in turn.

    A weight, its product with g and what is taken off are stored, by 4 eps together, so each entry errs by
    4 eps w (|g| + s), s = sum w g; s by 2 eps of itself in a sum of float32, and by 2 log S eps where weights are
    exp(x - log sum), which rounds them all alike. Where the maximum is not detached what all entries err by remains at
    it. A sum in the dtype itself ends at 256 or 2048 terms.
    """
    width = _IN_HALF[-1]
    leaf = (case.normal(1, width, dtype=torch.float64) / 8).to(dtype).requires_grad_()
    probe = (3 - 2 * (torch.arange(width, device=leaf.device) % 2)).to(dtype)[None]
    try:
        weights = softmaxed(case, built, leaf)
        if not weights.requires_grad:
            return
        (got,) = torch.autograd.grad((weights * probe).sum(), leaf)
    except (SubjectError, RuntimeError):
        return
    exact, wide = softmax_oracle(leaf), probe.double().cpu()
    mean = (exact.cpu() * wide).sum(-1, keepdim=True)
    moved = 4 * epsilon(dtype) * exact.cpu() * (wide + mean)
    summing = ((2 + 2 * math.log(width)) * epsilon(dtype) + width * epsilon(torch.float32)) * mean
    case.close(
        (got.double().cpu() * wide).sum(-1),
        (exact.cpu() * (wide - mean) * wide).sum(-1),
        f"the gradient of rows of {width} scores{_in(dtype)} is not that of softmax",
        bound=float(moved.sum() * wide.max() + (summing * mean).sum()),
        asks=("half_precision", False),
        constants_allowed=True,
    )


def _longest(case: Case, built: Built) -> int:
    """Return the longest row that a subject is called on.

    0 where the largest tensor that is made of a row grows with the square of its length (40 GB at 100,000), and a tenth
    where the number of its operations grows with it: a loop in Python takes seconds a call.
    """
    key = ("longest row", built.dtype)
    if key not in case.bench.measured:
        with off_the_record(case):
            costs = []
            for width in (512, 1024):
                scores = torch.zeros(1, width, dtype=built.dtype, device=case.bench.device)
                with CostWatch() as watch:
                    softmaxed(case, built, scores)
                costs.append((watch.largest, watch.calls))
        (small, few), (large, many) = costs
        case.bench.measured[key] = 0 if large > 3 * small else LONGEST // 10 if many > few + _LOOP else LONGEST
    return int(case.bench.measured[key])


def _worst_rows(case: Case, built: Built, dtype: torch.dtype, width: int, kinds: Sequence[int]) -> list[int]:
    """Return the kinds of rows of a length whose weights are wrong, of unlike sizes and places of what is large."""
    if width < 4:  # a row of which nothing is left
        return []
    found: set[int] = set()
    generator = torch.Generator().manual_seed(width)
    ordinary = torch.randn(len(kinds), width, generator=generator, dtype=torch.float64).to(case.bench.device, dtype)
    for peak, at in ((80.0, 0), (1e4, _BLOCK - 1)):
        rows = placed(ordinary, peak, at, kinds)
        exact, bound = softmax_of_long_rows(rows, dtype)
        off = (softmaxed(case, built, rows).detach().double() - exact).abs() / bound
        bad = ~(off <= 1).all(-1)
        found |= {kinds[row] for row in bad.nonzero().flatten().tolist()}
    return sorted(found)


def _cause(case: Case, built: Built, dtype: torch.dtype, right: int, wrong: int, kinds: Sequence[int]) -> str | None:
    """Say from which length on the weights of rows along the last axis are wrong, and in which rows."""
    with off_the_record(case):
        if told := hidden_block_cause(lambda x: softmaxed(case, built, x), torch.zeros((), dtype=dtype)):
            return told
        if told := one_maximum_for_all(case, built) or streamed_rows_cause(case, built):
            return told
        if dtype in _HALVES and (told := _stuck(case, built, dtype)):
            return told
        bad = _worst_rows(case, built, dtype, wrong, kinds)
        if not bad:
            return None
        told = wrong_lengths(
            lambda width: bool(_worst_rows(case, built, dtype, width, kinds)), right, wrong, "scores a row"
        )
    if len(bad) > 3:
        return told
    where = "wrong are rows " + ", rows ".join(ROWS[kind] for kind in bad)
    return f"{told}; {where}" if told else where


def _stuck(case: Case, built: Built, dtype: torch.dtype) -> str | None:
    """Read the sum of equal terms off their weights, and see whether twice as many give the same."""
    sums = []
    for width in (_IN_HALF[-1], 2 * _IN_HALF[-1]):
        weights = softmaxed(case, built, torch.zeros(1, width, dtype=dtype, device=case.bench.device))
        sums.append(1 / float(weights.detach().double().amax()))
    if sums[0] != sums[1] or sums[0] > 0.9 * _IN_HALF[-1]:
        return None
    return f"the sum of equal terms stops growing at {sums[0]:g}: it is kept in the dtype of the scores, not in float32"


def _rows_cause(case: Case, built: Built, rows: Tensor, probe: Tensor | None = None) -> str | None:
    """Say from how many rows on some have other weights than by themselves; with `probe`, another gradient."""

    def of(some: Tensor, along: Tensor | None) -> Tensor:
        leaf = some.detach().clone().requires_grad_(along is not None)
        weights = softmaxed(case, built, leaf)
        return weights if along is None else torch.autograd.grad((weights * along).sum(), leaf)[0]

    if probe is None and (told := other_maximum_cause(case, built)):
        return told
    with off_the_record(case):
        parts = range(0, len(rows), 8)
        alone = torch.cat([of(rows[n : n + 8], None if probe is None else probe[n : n + 8]) for n in parts])

        def is_wrong(count: int) -> bool:
            together = of(rows[:count], None if probe is None else probe[:count])
            return not bool(((together - alone[:count]).abs() <= 64 * epsilon(rows.dtype)).all())

        return wrong_lengths(is_wrong, 0, len(rows), "rows")


def _gradient_cause(case: Case, built: Built, dtype: torch.dtype, wrong: int) -> str | None:
    """Say from which length on the gradient of an ordinary row is wrong."""

    def is_wrong(width: int) -> bool:
        generator = torch.Generator().manual_seed(width)
        x, g = torch.randn(2, 1, width, generator=generator, dtype=torch.float64).to(case.bench.device, dtype)
        leaf, g = x.clone().requires_grad_(), g + 2
        (got,) = torch.autograd.grad((softmaxed(case, built, leaf) * g).sum(), leaf)
        exact, wide = softmax_oracle(x), g.double()
        expected = exact * (wide - (exact * wide).sum(-1, keepdim=True))
        bound = 8 * (width + 16 + 2 * math.log(width)) * epsilon(dtype) * float(wide.abs().max())
        return not bool(((got.double() - expected).abs() <= bound * exact.amax()).all())

    with off_the_record(case):
        return wrong_lengths(is_wrong, 0, wrong, "scores a row")
