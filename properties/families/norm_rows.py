"""Norms of other widths than the drawn ones: every block of channels enters the statistics, and none twice."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import CostWatch
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.rounding import epsilon, rounding_bound
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.diagnosis.norms import divisor_cause, lanes_cause, weighed_otherwise
from veriformer.properties.engine.case import Case
from veriformer.properties.probes.norms import NormModel, read_off

WIDTHS = ((1, 2, 3), (31, 33, 65), (127, 129, 257), (1000, 1025), (4097, 8192))
"""Around the usual blocks; one of each group is drawn."""

_BLOCK = 32
_FAR = 100.0
"""The mean of one block, in standard deviations of its channels."""


_MANY = 500
"""Operations of a call: a loop over the channels in Python, which takes seconds where they are many."""

_WIDE = 4097
"""Channels of a norm in half precision: a sum of more than 2048 equal terms sticks in both of its dtypes."""

_TOLD = (
    "of ordinary channels",
    "whose first block is far off",
    "whose middle block is far off",
    "whose last block is far off",
    "whose first channel is far off",
    "whose last channel is far off",
)


def every_block_of_channels_counts(case: Case, built: Built, centred: bool) -> None:
    """Compare a norm of other widths with its formula, on tokens of which one block of channels is far from the rest.

    Args:
        case: of `norm.definition`.
        built: the norm as it was built for the drawn sizes.
        centred: whether it subtracts the mean.
    """
    right = 0
    for group in WIDTHS:
        width = case.choice("width", group)
        other = at_width(case, built.dtype, width)
        if other is None:
            continue
        x = case.apply(_tokens, case.normal(6, width, dtype=torch.float64)).to(built.dtype)[None]
        try:
            with CostWatch() as watch:
                got = case.call(other, x)
        except SubjectError:  # it is a kernel of other widths
            continue
        if watch.calls > _MANY:
            return
        if width == 1 and centred:
            case.finite(got, "a token of one channel gives NaN or infinity")
            continue
        model = read_off(case, other, centred)
        expected = model(x)
        case.close(
            got.double(),
            expected,
            f"at a width of {width} the output is not that of the formula",
            bound=_bound(model, x, expected),
            cause=lambda right=right, width=width: _cause(case, built.dtype, centred, right, width),  # type: ignore[misc]
        )
        right = width


def sums_do_not_stick(case: Case) -> None:
    """Compare a norm of 4097 channels in half precision with the same in float64.

    A norm may store each step in the dtype, ten of them, by u of the largest output each; a sum of 4097 squares that
    stops growing at 256 terms in bfloat16, at 2048 in float16, leaves a deviation that is a quarter, or 0.7, of it.

    Args:
        case: of `norm.half-precision`.
    """
    dtype = getattr(torch, case.choice("format", ("bfloat16", "float16")))
    low = at_width(case, dtype, _WIDE)
    if low is None or not isinstance(low.module, torch.nn.Module):
        return
    turns = 1.0 - 2 * (torch.arange(_WIDE) % 2)
    x = turns.to(case.bench.device) + 0.25 + case.normal(1, 2, _WIDE, dtype=torch.float64) / 8
    x[:, 1] *= 8
    try:
        got = case.call(low, x.to(dtype))
        wide = replace(case.copy_of(low), dtype=torch.float64)
        case.apply(widen, wide.module)
        expected = case.call(wide, x.to(dtype).double())
    except SubjectError:
        return
    name = str(dtype).removeprefix("torch.")
    case.close(
        got.double(),
        expected.detach().double(),
        f"in {name} the norm of {_WIDE} channels is not that of float64",
        bound=(5 * epsilon(dtype) * expected.detach().double().abs().amax(-1, keepdim=True)).expand_as(expected),
        asks=("half_precision", False),
        cause=lambda: _stuck(got, expected, name),
    )


def widen(module: torch.nn.Module) -> None:
    """Turn a model's numbers into float64: a step for `Calling.apply`."""
    module.double()


def _stuck(got: Tensor, expected: Tensor, name: str) -> str | None:
    """Say at how many terms the sum of squares ends, where outputs are all too large by one factor."""
    ratios = (got.detach().double() / expected.detach().double()).flatten()
    ratios = ratios[ratios.isfinite()]
    factor = float(ratios.median())
    if factor < 1.1 or float((ratios - factor).abs().median()) > 0.1 * factor:
        return None
    terms = _WIDE / factor**2
    return (
        f"outputs are {factor:.3g} times as large: the sum of squares ends at {terms:.0f} terms, as one in {name} does"
    )


def at_width(case: Case, dtype: torch.dtype, width: int) -> Built | None:
    """Return the norm of a width, if it can have that one."""
    config = case.config()
    heads = {} if not width % config.num_heads else {"num_heads": 1, "num_key_value_heads": 1}
    return case.built_at(dtype, d_model=width, **heads)


def _tokens(ordinary: Tensor) -> Tensor:
    """Return six tokens `[6, D]`: ordinary, one block far off at each place, and one channel far off at either end."""
    x, width = ordinary.clone(), ordinary.shape[-1]
    middle = width // 2
    x[1, :_BLOCK] += _FAR
    x[2, middle : middle + _BLOCK] -= _FAR
    x[3, -min(_BLOCK, width) :] += _FAR
    x[4, 0] += _FAR
    x[5, width - 1] -= _FAR
    return x


def _bound(model: NormModel, x: Tensor, expected: Tensor) -> Tensor:
    """Bound the rounding of a norm, token by token, `[..., 1]`.

    As at the drawn sizes: three reductions over D, and eps that was measured to 16 roundings. What is subtracted rounds
    in proportion to the largest entry in units of the deviation, whether before the division or after it.
    """
    wide = x.double()
    shifted = wide - wide.mean(-1, keepdim=True) if model.centred else wide
    deviation = (shifted.square().mean(-1, keepdim=True) + float(model.eps)).sqrt()
    largest = wide.abs().amax(-1, keepdim=True) / deviation
    rounding = rounding_bound(x.dtype, x.shape[-1], operations=3)
    one = rounding * (2 + 2 * largest) + 16 * epsilon(x.dtype) * largest
    return float(model.gain.abs().max()) * 4 * one + rounding * size_of(expected)


def _cause(case: Case, dtype: torch.dtype, centred: bool, right: int, wrong: int) -> str | None:
    """Say from which width on a norm is not its formula, and for which tokens."""

    def wrong_tokens(width: int) -> list[int]:
        built = at_width(case, dtype, width)
        if built is None or (width == 1 and centred):
            return []
        generator = torch.Generator().manual_seed(width)
        ordinary = torch.randn(len(_TOLD), width, generator=generator, dtype=torch.float64)
        x = _tokens(ordinary).to(case.bench.device, dtype)[None]
        model = read_off(case, built, centred)
        expected = model(x)
        off = (case.call(built, x).detach().double() - expected).abs() / _bound(model, x, expected)
        return [int(n) for n in (~(off[0] <= 1).all(-1)).nonzero().flatten()]

    with off_the_record(case):
        bad = wrong_tokens(wrong)
        told = (
            lanes_cause(case)
            or divisor_cause(case)
            or weighed_otherwise(case)
            or wrong_lengths(lambda width: bool(wrong_tokens(width)), right, wrong, "channels")
        )
    if not bad or len(bad) > 3:
        return told
    where = "wrong are tokens " + ", ".join(_TOLD[n] for n in bad)
    return f"{told}; {where}" if told else where
