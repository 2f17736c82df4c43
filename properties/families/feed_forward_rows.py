"""Feed-forward networks on many tokens, and of large widths: every chunk is computed, the last one too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import makes_choices
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.engine.case import Case

SHAPES = ((1, 1), (1, 5), (1, 63), (1, 65), (1, 129), (1, 257), (9, 5), (9, 129), (1, 1000))
"""Samples and tokens: fewer than a chunk of the usual sizes, nearly one, one token more than one, two and four, many."""

_MOST = 1161
_EDGES = (0, 62, 64, 128, 511)
"""Tokens about the edges of the usual chunks; the last one is looked at besides."""

LARGE = (1001, 4099)
"""Hidden widths that are odd, and no whole number of the usual blocks."""


def many_tokens(case: Case, built: Built) -> None:
    """Compare tokens among many others with themselves alone, and a few with what they give among all.

    Experts that are chosen by numbers are left to float64: of 1000 tokens in float32, one may lie on the edge.

    Args:
        case: of `ffn.position-wise`.
        built: model.
    """
    if built.dtype != torch.float64 and makes_choices(case.bench, built):
        return
    x = case.normal(_MOST, built.config.d_model, dtype=built.dtype)
    for batch, length in _drawn(case):
        count = batch * length
        try:
            together = case.call(built, x[:count].reshape(batch, length, -1)).reshape(count, -1)
        except SubjectError:  # it is made for fewer tokens
            return
        here = [n for n in _EDGES if n < count - 1] + [count - 1]
        alone = torch.cat([case.call(built, x[n].reshape(1, 1, -1)).reshape(1, -1) for n in here])
        of = f"{length} tokens" if batch == 1 else f"{batch} samples of {length} tokens"
        case.close(
            together[here],
            alone,
            f"a token among {of} gives another output than by itself",
            cause=lambda batch=batch, count=count: _cause(case, built, x, batch, count),  # type: ignore[misc]
        )


def _drawn(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    return SHAPES[case.integer("shape", 0, len(SHAPES) - 1)], (1, 1000)


def _cause(case: Case, built: Built, x: Tensor, batch: int, wrong: int) -> str | None:
    """Say from how many tokens of one sample on some are wrong, or of a batch, and what they give."""

    def outputs(count: int) -> tuple[Tensor, Tensor]:
        shape = (batch, count // batch, -1)
        together = case.call(built, x[:count].reshape(shape)).reshape(count, -1).detach()
        return together, case.call(built, x[:count].reshape(count, 1, -1)).reshape(count, -1).detach()

    def rows(count: int) -> Tensor:
        together, alone = outputs(count)
        limit = case.tolerance(built) * size_of(alone)
        return ~((together - alone).abs() <= limit).all(-1)

    with off_the_record(case):
        if batch > 1:
            bad = rows(wrong).nonzero().flatten().tolist()
            return f"right in one sample; of {wrong} tokens of {batch} samples wrong from token {bad[0]} on" if bad else None
        told = wrong_lengths(lambda count: bool(rows(count).any()), 0, wrong, "tokens")
        together, _ = outputs(wrong)
        bad = rows(wrong).nonzero().flatten().tolist()
    if not bad:
        return told
    what = "zeros" if bool((together[bad] == 0).all()) else "other numbers"
    where = f"of {wrong} tokens {_places(bad)} give {what}"
    return f"{told}; {where}" if told else where


def _places(bad: list[int]) -> str:
    if len(bad) == bad[-1] - bad[0] + 1:
        return f"token {bad[0]}" if len(bad) == 1 else f"tokens {bad[0]} to {bad[-1]}"
    return f"{len(bad)} tokens, the first of them {bad[0]},"


def inputs_of_many_tokens(case: Case, built: Built) -> Iterator[tuple[Built, Tensor, str]]:
    """Yield models and inputs to judge by the formula: many tokens, a batch of 9, and a large width where it has one.

    Args:
        case: of `ffn.definition`.
        built: model of the drawn sizes.
    """
    x = case.normal(_MOST, built.config.d_model, dtype=built.dtype)
    for batch, length in _drawn(case):
        yield built, x[: batch * length].reshape(batch, length, -1), f"for {batch} x {length} tokens "
    width = case.choice("F", LARGE)
    large = case.built_at(built.dtype, d_ff=width)
    if large is not None:
        yield large, x[:5].reshape(1, 5, -1), f"for a hidden width of {width} "
