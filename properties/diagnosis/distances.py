"""Biases by distance that are counted from the wrong end: read off the weights of a text of one token repeated."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.diagnosis.attentions import attentions
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import Stream
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.paths import DEFAULT, Path

_LENGTH = 6
_NEAR = 1e-3  # of logarithms of weights, beside differences of a bias


def counted_from_the_end(stream: Stream, path: Path) -> str | None:
    """Say that a distance has what another one has in a longer sequence: it is counted from the longest one."""
    token = stream.draw(1, 1)
    short, long = (_by_distance(stream, token, length, path) for length in (_LENGTH, _LENGTH + 1))
    if short is None or long is None:
        return None
    same, shifted = long[..., :_LENGTH] - long[..., :1], long[..., 1:] - long[..., 1:2]
    if not _alike(shifted, short) or _alike(same, short):
        return None
    return (
        f"a key d steps back has with {_LENGTH} inputs what one d + 1 steps back has with {_LENGTH + 1}: what stands "
        "for a distance depends on the length: rows are taken from the wrong end of their table (the first T for the "
        "last T), or distances are counted from the longest one"
    )


def distance_opinion(case: Case, problem: Violation) -> str | None:
    """Say the same of a subject that need not be causal, whose outputs another length of the sequence changes."""
    del problem
    built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
    if built.config.max_len <= _LENGTH:
        return None
    return counted_from_the_end(Stream(case, built), DEFAULT)


def _by_distance(stream: Stream, token: Tensor, length: int, path: Path) -> Tensor | None:
    """Return `[..., T]`: what the first attention adds at each distance, less that at 0; None if it adds nothing."""
    x = token.expand(1, length, *token.shape[2:]).contiguous()
    seen = attentions(lambda: stream(x, path=path))
    if not seen or seen[0].weights.shape[-2:] != (length, length):
        return None
    rows = seen[0].weights.double().clamp(min=1e-300).log()
    last, before = rows[..., -1, :].flip(-1), rows[..., -2, :-1].flip(-1)
    found, other = last - last[..., :1], before - before[..., :1]
    return found if _alike(found[..., :-1], other) and bool(found.abs().amax() > 10 * _NEAR) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().amax() <= _NEAR * max(1.0, float(torch.maximum(one.abs(), other.abs()).amax())))
