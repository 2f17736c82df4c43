"""Feed-forward networks on many tokens, and of large widths: every chunk is computed, the last one too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import makes_choices
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.feed_forward import nearest_reading, read
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.lengths import wrong_lengths
from veriformer.properties.engine.case import Case, Cause

SHAPES = ((1, 1), (1, 5), (1, 63), (1, 65), (1, 129), (1, 257), (9, 5), (9, 129), (1, 1000))
"""Samples and tokens: fewer than a chunk of the usual sizes, nearly one, one token more than some, many."""

_CROWD, _MIXTURES = 96, 42
"""Tokens of which each expert gets some; and so many batches of 1 to 7 of them, in some of which one gets none."""
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
            f"a token gives another output among others than by itself, in {of}",
            cause=lambda batch=batch, count=count: tokens_cause(case, built, x[:count], batch),  # type: ignore[misc]
        )


def _drawn(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    return SHAPES[case.integer("shape", 0, len(SHAPES) - 1)], (1, 1000)


def tokens_cause(case: Case, built: Built, x: Tensor, batch: int) -> str | None:
    """Say from how many tokens of one sample on some are wrong, or of a batch, and what they give.

    Args:
        case: of the violation.
        built: model.
        x: tokens `[N, D]`.
        batch: number of samples that they are divided into.
    """
    if told := unused_experts_cause(case, built):
        return told
    with off_the_record(case):
        alone = torch.cat([case.call(built, part[:, None]).detach()[:, 0] for part in x.split(4)])
        limit = case.tolerance(built) * size_of(alone)

        def rows(count: int, samples: int = 1) -> tuple[Tensor, list[int]]:
            together = case.call(built, x[:count].reshape(samples, count // samples, -1)).detach().reshape(count, -1)
            off = ~((together - alone[:count]).abs() <= limit).all(-1)
            return together, [int(n) for n in off.nonzero().flatten()]

        if any(rows(count)[1] for count in range(2, 21)):
            return None  # `misplaced` knows more of few tokens
        told = wrong_lengths(lambda count: bool(rows(count)[1]), 0, len(x), "tokens")
        together, bad = rows(len(x), batch)
    if not bad:
        return told
    what = "zeros" if bool((together[bad] == 0).all()) else "other numbers than by themselves"
    where = f"of {len(x)} tokens in {batch} sample{'s' * (batch > 1)} {_places(bad)} give {what}"
    return f"{told}; {where}" if told else where


def width_cause(case: Case, dtype: torch.dtype, name: str, wrong: int) -> str | None:
    """Say from which hidden width on a network is not its formula; `name` is the declared activation."""

    def is_wrong(width: int) -> bool:
        built = case.built_at(dtype, d_ff=width)
        if built is None or not read(built.module, built.config, name):
            return False
        generator = torch.Generator().manual_seed(width)
        x = torch.randn(1, 5, built.config.d_model, generator=generator, dtype=torch.float64).to(
            case.bench.device, dtype
        )
        got = case.call(built, x).detach().double()
        expected = nearest_reading(built.module, built.config, x, name, got)
        return not float((got - expected).abs().max()) <= 64 * epsilon(dtype) * width**0.5 * size_of(expected)

    with off_the_record(case):
        return wrong_lengths(is_wrong, 0, wrong, "hidden units")


def _places(bad: list[int]) -> str:
    if len(bad) == bad[-1] - bad[0] + 1:
        return f"token {bad[0]}" if len(bad) == 1 else f"tokens {bad[0]} to {bad[-1]}"
    return f"{len(bad)} tokens, the first of them {bad[0]},"


def inputs_of_many_tokens(case: Case, built: Built, name: str) -> Iterator[tuple[Built, Tensor, str, Cause]]:
    """Yield models, inputs, what they are in words, and what asks for a cause: many tokens, a large hidden width.

    Args:
        case: of `ffn.definition`.
        built: model of the drawn sizes.
        name: the declared activation.
    """
    x = case.normal(_MOST, built.config.d_model, dtype=built.dtype)
    for batch, length in _drawn(case):
        count = batch * length
        yield (
            built,
            x[:count].reshape(batch, length, -1),
            f"for {batch} x {length} tokens ",
            partial(tokens_cause, case, built, x[:count], batch),
        )
    width = case.choice("F", LARGE)
    large = case.built_at(built.dtype, d_ff=width)
    if large is not None:
        told = partial(width_cause, case, built.dtype, name, width)
        yield large, x[:5].reshape(1, 5, -1), f"for a hidden width of {width} ", told


def unused_experts_cause(case: Case, built: Built) -> str | None:
    """Say that tokens are wrong where an expert before the last one in use is chosen by none, and right elsewhere.

    Args:
        case: of a token that gives another output among others.
        built: a mixture of experts, whose router is known.
    """
    if case.subject.router is None:
        return None
    generator, seen = torch.Generator().manual_seed(1), set[tuple[bool, bool]]()
    with off_the_record(case), torch.no_grad():
        many = torch.randn(1, _CROWD, built.config.d_model, generator=generator, dtype=torch.float64)
        many = many.to(case.bench.device, built.dtype)
        chosen, right = case.ask("router", many, built=built)[0] > 0, case.call(built, many)
        if not bool(chosen.any(0).all()):
            return None
        for trial in range(_MIXTURES):
            few = torch.randperm(_CROWD, generator=generator)[: 1 + trial % 7]
            used = chosen[few].any(0).nonzero().flatten()
            off = (case.call(built, many[:, few]) - right[:, few]).abs().max()
            seen.add((len(used) <= int(used.max()), float(off) > 1e-4 * size_of(right)))
    if seen != {(True, True), (False, False)}:
        return None
    return (
        "tokens are right where every expert up to the last one in use is chosen, and wrong where one of them gets no "
        "token: runs of sorted tokens are paired with the experts from the first on, and empty ones are not counted"
    )
