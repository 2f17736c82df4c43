"""Whose row of a bias by distance each query of a chunk is given, where it has keys and queries of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.diagnosis.attentions import Attended
from veriformer.properties.diagnosis.caches.kept import steps_of
from veriformer.properties.diagnosis.caches.runs import CachedRuns

_FORM = (3, 4, 1, 1)
_NEAR = 1e-4  # of logarithms of weights: far above rounding of float32, far below a bias that shows


def biased_cause(runs: CachedRuns) -> str | None:
    """Say that queries of a chunk are given the bias, and the mask in it, of another query; None where they are not.

    What is added to the scores is read off the whole run, without the products of queries and keys: with what scale
    these enter is found by trying.
    """
    x = runs.tokens(3, sum(_FORM))
    whole = runs.attended(lambda: runs.whole(x))
    steps = steps_of(runs.attended(lambda: runs.cached(x, _FORM)), len(whole))
    if not whole or steps is None or len(steps) != len(_FORM):
        return None
    step, expected = steps[1], whole[0]
    got, end = step.layers[0], step.start + step.size
    if got.weights.shape[-2:] != (step.size, end) or got.query.shape[:-2] != expected.query.shape[:-2]:
        return None
    for scale in (1.0, expected.query.shape[-1] ** -0.5):
        rows = _rows(got, expected, step.start, end, scale)
        if rows is not None and rows != list(range(step.start, end)):
            told = f"{rows}, the last of that chunk" if set(rows) == {end - 1} else f"{rows}"
            return (
                f"behind {step.start} cached tokens the queries of a chunk, {list(range(step.start, end))}, are given "
                f"the bias by distance, and the mask, of the queries {told}: rows of the bias are taken for the wrong "
                "queries where a chunk has several"
            )
    return None


def _rows(got: Attended, expected: Attended, start: int, end: int, scale: float) -> list[int] | None:
    """Return of which query each one has the bias; None unless all have that of one."""
    known = _bias(expected, scale)[..., :end, :end]
    if not _moves(known[..., start:end, :]):
        return None  # no bias, or the same for all: nothing tells whose it is
    found, given = [], _bias(got, scale)
    for row in given.unbind(-2):
        fits = [t for t in range(end) if _alike(row, known[..., t, :])]
        if len(fits) != 1:
            return None
        found += fits
    return found


def _bias(a: Attended, scale: float) -> Tensor:
    """Return what is added to scores `[..., T, S]`, up to a number a row; -inf where a weight is 0."""
    return a.weights.double().log() - scale * (a.query.double() @ a.key.double().mT)


def _moves(bias: Tensor) -> bool:
    """Whether a bias is the same for all samples and another one for each distance."""
    seen = bias.isfinite()
    if not bool(seen[..., :1].all()):
        return False
    level = torch.where(seen, bias - bias[..., :1], 0)
    return bool((level - level[:1]).abs().max() < _NEAR) and bool(level.abs().amax() > 10 * _NEAR)


def _alike(row: Tensor, known: Tensor) -> bool:
    seen = known.isfinite()
    if not torch.equal(seen, row.isfinite()) or not bool(seen[..., :1].all()):
        return False
    apart = torch.where(seen, row - known, 0)
    return bool(torch.where(seen, apart - apart[..., :1], 0).abs().max() < _NEAR)
