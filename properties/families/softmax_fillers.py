"""Rows of a softmax that are summed up in blocks: scores of 0 that fill up the last, and slips in rescaling."""

from __future__ import annotations

import math

import torch

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.streamed import streamed_slips

_NEAR = 1e-4
_ROWS = 4
_LONG = (9, 23, 45, 90, 180, 300, 520)
_WIDTHS = (3, 5, 6, 7, 9, 10, 13, 17, 21)


def filled_cause(case: Case, built: Built) -> str | None:
    """Say to multiples of what rows are filled up with scores of 0, read off how much less than one they sum to.

    A sum w of weights less than 1 means (1 / w - 1) sum exp(x) more in the denominator: n times exp(0) where n scores
    of 0 stand beside those that were given.

    Args:
        case: of a softmax whose rows sum to less than one.
        built: its function.
    """
    if case.subject.kind != "softmax":
        return None
    for of, words in ((0.0, "scores of 0"), (None, "zeros behind the subtraction of the maximum, each exp(0) = 1")):
        counts = _fillers(case, built, of)
        if counts is not None and any(counts.values()):
            return _in_words(counts, words, is_sink=of is not None)
    return None


def _fillers(case: Case, built: Built, of: float | None) -> dict[int, int] | None:
    """Return how many scores more are in the sum of rows of several widths; None where that is no whole number.

    Args:
        case: of a softmax whose rows sum to less than one.
        built: its function.
        of: what each of these scores is; None for the maximum of its row.
    """
    counts: dict[int, int] = {}
    with off_the_record(case):
        for width in _WIDTHS:
            scores = torch.linspace(-1, 1.5, width, dtype=built.dtype, device=case.bench.device)[None].repeat(2, 1)
            scores[1] = scores[1].flip(-1) * 0.5
            given = (scores, -1) if case.subject.accepts("dim") else (scores,)
            weights, wide = case.call(built, *given).detach().double(), scores.double()
            each = wide.amax(-1) if of is None else torch.full_like(wide[:, 0], of)
            more = (1 / weights.sum(-1) - 1) * (wide - each[:, None]).exp().sum(-1)
            whole = more.round()
            if float((more - whole).abs().max()) > 0.02 or bool((whole != whole[0]).any()):
                return None
            counts[width] = int(whole[0])
    return counts


def _in_words(counts: dict[int, int], words: str, *, is_sink: bool) -> str | None:
    """Say to what rows are filled up, of so many fillers by width."""
    for size in range(2, 129):
        if any(counts.values()) and all(many == -width % size for width, many in counts.items()):
            return (
                f"rows are filled up to multiples of {size} with {words}, and the sum of exponentials counts them: "
                "-inf is what adds nothing"
            )
    (many, *others) = set(counts.values())
    if others:
        rows = ", ".join([f"{n} in rows of {width}" for width, n in counts.items() if n][:4])
        return f"{words} that fill up the last block are in the sum that divides ({rows}): -inf adds nothing"
    if not is_sink:
        return f"{many} more of the row's largest score are in the sum that divides"
    return f"{many} more scores of 0 are in the sum that divides: a sink (declare sink=True if that is meant)"


def streamed_rows_cause(case: Case, built: Built) -> str | None:
    """Say which slip of a softmax in blocks explains its weights, in rows of the first length that has one.

    Args:
        case: of a softmax whose weights are wrong.
        built: its function.
    """
    if case.subject.kind != "softmax" or case.subject.fact("sink"):
        return None
    left: list[tuple[int, str]] = []
    with off_the_record(case):
        for width in _LONG:
            generator = torch.Generator().manual_seed(width)
            scores = 3 * torch.randn(_ROWS, width, generator=generator, dtype=torch.float64)
            scores[0], scores[1, -1] = (
                scores[0].sort().values,
                scores[1].amax() + 1,
            )  # the last block raises the maximum
            scores = scores.to(case.bench.device, built.dtype)
            given = (scores, -1) if case.subject.accepts("dim") else (scores,)
            weights = case.call(built, *given).detach().double()
            slack = max(1e-5, 16 * float(torch.finfo(built.dtype).eps))
            found = streamed_slips(scores.double(), weights, slack)
            left = [slip for slip in left if slip in found] if left and found else left or found
            if found and len(left) == 1:
                break
    return f"blocks of {left[0][0]} scores: {left[0][1]}" if left else None


def maximum_of_zero(case: Case, built: Built) -> str | None:
    """Say that what is subtracted is never below 0: right for rows with a positive score, and not for others.

    Args:
        case: of a softmax that common shifts change.
        built: its function.
    """
    if case.subject.kind != "softmax":
        return None
    with off_the_record(case):
        far = 2.0 * math.log(float(torch.finfo(built.dtype).max))
        row = torch.tensor([[0.0, -1.0, 0.5, -2.0]], dtype=torch.float64)
        for offset, is_right in ((far, True), (-far, False)):
            scores = (row + offset).to(case.bench.device, built.dtype)
            given = (scores, -1) if case.subject.accepts("dim") else (scores,)
            got = case.call(built, *given).detach()
            right, raised = scores.double().softmax(-1), (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
            guess = right.to(got) if is_right else raised / raised.sum(-1, keepdim=True)
            if not torch.allclose(got, guess, rtol=0.05, atol=0.02, equal_nan=True):
                return None
    return (
        "rows of scores that are all negative are not shifted by their maximum, rows with a positive one are: the "
        "maximum begins at 0, or at the smallest positive number, not at -inf (or a 0 stands in among the scores)"
    )


def other_maximum_cause(case: Case, built: Built) -> str | None:
    """Say that the maximum which is subtracted runs over another axis than the sum.

    Args:
        case: of a softmax whose weights are wrong along some axis.
        built: its function.
    """
    if case.subject.kind != "softmax" or not case.subject.accepts("dim"):
        return None
    with off_the_record(case):
        x = 2 * torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        x = x.to(case.bench.device, built.dtype)
        for dim in (0, 1, 2, -1):
            got, wide = case.call(built, x, dim).detach().double(), x.double()
            if float((got - wide.softmax(dim)).abs().max()) < _NEAR:
                continue
            for other in range(3):
                shifted = (wide - wide.amax(other, keepdim=True)).softmax(dim)
                if other != dim % 3 and float((got - shifted).abs().max()) < _NEAR:
                    which = "the last axis" if other == 2 else f"axis {other}"
                    return (
                        f"the maximum that is subtracted runs over {which} whatever the axis of the sum: along axis "
                        f"{dim} entries of one row are shifted by different amounts"
                    )
    return None
