"""At which widths a norm is wrong, and with which weights its channels enter the statistics there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.formulas.numbers import which
from veriformer.properties.probes.norms import is_centred, normalised

_WIDEST = 34
"""Beyond twice the usual tile of small tests (16)."""
_FILLED_UP = (8, 12, 20, 24, 5)
_SCALE = 100.0
"""Where an eps of up to 1e-3 changes 1e-7."""
_LIMIT = 1e-5


def wrong_widths(case: Case, problem: Violation | None = None) -> str | None:
    """Say at which widths a norm as built does not normalise, where it does at others.

    Args:
        case: of the violation.
        problem: the violation; what is measured does not depend on it.
    """
    return _wrong_widths(case)[0]


def weighed_otherwise(case: Case) -> str | None:
    """Say the same where it is seen with which weights the channels enter the statistics there."""
    told, is_explained = _wrong_widths(case)
    return told if is_explained else None


def _wrong_widths(case: Case) -> tuple[str | None, bool]:
    if case.subject.build is None or case.subject.fact("norm") in ("none", "other"):
        return None, False
    with off_the_record(case):
        wrong, tried = [], list[int]()
        for width in range(2, _WIDEST):
            try:
                x, y, centred = _called(case, width, 6)
            except Exception:  # it refuses this width
                continue
            tried.append(width)
            right = normalised(x, centred, 0.0)
            if not float((y - right).abs().max()) <= (_LIMIT if y.dtype == torch.float64 else 1e-2):
                wrong.append(width)
        if not wrong or len(wrong) == len(tried) or tried != list(range(tried[0], tried[-1] + 1)):
            return None, False
        told = f"the norm is wrong at the widths {which(wrong, tried)}, else right"
        weighed = _weighed(case, next((n for n in wrong if n >= 12), wrong[-1]), wrong)
    return (f"{told}; {weighed}", True) if weighed else (told, False)


def lanes_cause(case: Case) -> str | None:
    """Say to multiples of what rows are filled up with zeros that count in the variance once the mean is subtracted.

    Each of them adds the square of the mean: as many as the excess of the variance times the width, over that square.

    Args:
        case: of the violation.
    """
    if case.subject.build is None or case.subject.fact("norm") in ("none", "other"):
        return None
    counts: dict[int, int] = {}
    with off_the_record(case):
        for width in _FILLED_UP:
            try:
                inputs, outputs, centred = _called(case, width, 8)
            except Exception:  # it refuses this width
                continue
            x, y = inputs[0], outputs[0]
            inner, outer = (z - z.mean(-1, keepdim=True) for z in (x, y))
            slope = (inner * outer).sum(-1) / inner.square().sum(-1)
            more = (slope.pow(-2) * width - inner.square().sum(-1)) / x.mean(-1).square()
            if not centred or float((more - more.mean().round()).abs().max()) > 1e-2:
                return None
            counts[width] = int(more.mean().round())
    size = next((n for n in range(2, 129) if all(many == -width % n for width, many in counts.items())), None)
    is_power = all(width + many == 1 << (width - 1).bit_length() for width, many in counts.items())
    if not any(counts.values()) or not (size or is_power):
        return None
    to = f"a multiple of {size}" if size else "the next power of two"
    return (
        f"rows are filled up with zeros to {to}, and in the variance these are not hidden once the "
        "mean is subtracted: each of them adds the square of the mean"
    )


def divisor_cause(case: Case) -> str | None:
    """Say by what the sum of squares is divided in place of the number of channels: the size of a block, say.

    Args:
        case: of the violation.
    """
    if case.subject.build is None or case.subject.fact("norm") in ("none", "other"):
        return None
    counts: dict[int, int] = {}
    with off_the_record(case):
        for width in _FILLED_UP:
            try:
                inputs, outputs, centred = _called(case, width, 8)
            except Exception:  # it refuses this width
                continue
            inner, outer = (z - z.mean(-1, keepdim=True) if centred else z for z in (inputs[0], outputs[0]))
            slope = (inner * outer).sum(-1) / inner.square().sum(-1)
            divisors = inner.square().sum(-1) * slope.square()
            if not float((divisors - divisors.mean().round()).abs().max()) < 1e-2:
                return None
            counts[width] = int(divisors.mean().round())
    if all(count == width for width, count in counts.items()):
        return None
    size = next((n for n in range(2, 129) if all(count == -(-w // n) * n for w, count in counts.items())), None)
    is_power = all(count == 1 << (width - 1).bit_length() for width, count in counts.items())
    if not (counts and (size or is_power)):
        return None
    to = f"the next multiple of {size}" if size else "the next power of two"
    shown = ", ".join(f"{count} at width {width}" for width, count in sorted(counts.items())[:3])
    return f"the sum of squares is divided by {to} ({shown}), the size of a block, not by the number of channels"


def _called(case: Case, width: int, tokens: int) -> tuple[Tensor, Tensor, bool]:
    config = replace(case.config(), d_model=width, num_heads=1, num_key_value_heads=1)
    built = case.bench.pool.fresh(config, judged_dtypes(case.bench)[-1], raw=True)
    generator = torch.Generator().manual_seed(width)
    x = _SCALE * (torch.randn(1, tokens, width, generator=generator, dtype=torch.float64) + 1)
    x = x.to(case.bench.device, built.dtype)
    with torch.no_grad():
        return x.double(), case.call(built, x).detach().double(), is_centred(case, built)


def _weighed(case: Case, width: int, wrong: list[int]) -> str | None:
    """Read off the weight of each channel in the mean and in the variance: an output is (x - m) / s."""
    inputs, outputs, centred = _called(case, width, 4 * width)
    x, y = inputs[0], outputs[0]
    inner, outer = (z - z.mean(-1, keepdim=True) for z in (x, y))
    slope = (inner * outer).sum(-1) / inner.square().sum(-1)
    if float((outer - slope[:, None] * inner).abs().max()) > 1e-6:
        return None  # it is no shift and one factor a token
    middle = x.mean(-1) - y.mean(-1) / slope
    told = []
    for name, given, of in (
        ("mean", middle if centred else None, x),
        ("variance" if centred else "mean square", slope.pow(-2), (x - middle[:, None]).square()),
    ):
        if given is None:
            continue
        weights = torch.linalg.lstsq(of, given[:, None]).solution[:, 0]
        if float((of @ weights - given).abs().max()) > 1e-6 * float(given.abs().max()):
            continue
        if float((weights - 1 / width).abs().max()) > 1e-6:
            runs = _runs(weights, wrong)
            told.append(f"in the {name} {runs if _OF_A_TILE in runs else _by_halves(weights) or runs}")
    return f"at width {width}, where each should enter by 1/{width}, {', and '.join(told)}" if told else None


_OF_A_TILE = "an incomplete tile is counted as a whole one"


def _by_halves(weights: Tensor) -> str | None:
    """Say of how many channels the tiles are whose means are joined as if both sides had as many."""
    width = len(weights)
    for tile in range(1, width):
        sizes = [min(tile, width - start) for start in range(0, width, tile)]
        shares = [0.5 ** max(len(sizes) - max(number, 1), 1) for number in range(len(sizes))]
        each = [share / size for share, size in zip(shares, sizes, strict=True) for _ in range(size)]
        if float((weights - torch.tensor(each).to(weights)).abs().max()) < 1e-6:
            return (
                f"tiles of {tile} channels are joined by halves, as (a + b) / 2: what is joined already counts no more "
                "than the next tile, however many channels it has"
            )
    return None


def _runs(weights: Tensor, wrong: list[int]) -> str:
    starts = [0, *(d for d in range(1, len(weights)) if abs(float(weights[d] - weights[d - 1])) > 1e-6)]
    if len(starts) > 4:
        return "the channels enter by weights of their own"
    parts = []
    for start, end in zip(starts, [*starts[1:], len(weights)], strict=True):
        which_ones = f"channels {start} to {end - 1}" if end - start > 1 else f"channel {start}"
        parts.append(f"{which_ones} enter{'s' if end - start == 1 else ''} by {float(weights[start]):.4g}")
    told = " and ".join(parts)
    if len(starts) == 2:
        start, rest = starts[1], len(weights) - starts[1]
        tile = float(weights[start:].sum() / weights[0])
        is_tile = abs(tile - round(tile)) < 1e-4 and all(n > round(tile) for n in wrong)
        if is_tile and rest < round(tile) and not start % round(tile):
            told += f" (the last {rest} together as much as {round(tile)}: {_OF_A_TILE})"
    return told
