"""Scores by distance alone, whatever turns queries and keys; part of `anatomy.positions`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case


def scores_go_by_distance(case: Case, flowing: Flow) -> None:
    """Require that the first attention gives one score to one pair of tokens at one distance, wherever it stands.

    What no rotation explains (queries and keys that are normalised, or angles that keep no length) shows in a text
    that is said twice: in the first layer the scores within both halves are the same.
    """
    if flowing.other:
        case.does_not_apply("no attention could be followed from its projections to its scores")
    seen, half = flowing.said_twice(), flowing.length // 2
    first = _first(seen, 2 * half)
    if first is None:
        case.does_not_apply("no attention could be followed from its projections to its scores")
    apart = case.apply(halves_apart, seen, half)
    case.subject.fact("positions")  # what is asked for counts as verified
    case.witness()
    case.require(
        apart < 1e3 * flowing.limit,
        f"the same tokens at the same distance have other scores later in a text, in {first.place or 'the model'}",
        got=f"{float(apart):.3g} of their size apart",
        expected="one score for one pair of tokens and one distance",
        error=apart,
        tolerance=1e3 * flowing.limit,
        cause=lambda: (
            _gains_behind(flowing, half)
            or (
                f"what is done to queries and keys in {first.place or 'the model'} is no rotation by an angle that is "
                "proportional to the position: halves and neighbours are paired in one place each, say, or a norm with "
                "a mean or gains stands behind the rotation"
            )
        ),
    )


def _gains_behind(flowing: Flow, half: int) -> str | None:
    """Say that the gains of norms of queries and keys are what moves the scores: with one gain for all it is gone."""
    case, config = flowing.case, flowing.built.config
    if case.subject.build is None:
        return None
    fresh = case.bench.pool.fresh(config, flowing.built.dtype)
    width = config.d_head
    gains = [
        n for n, p in fresh.module.named_parameters() if p.ndim and p.shape[-1] == width and p.numel() <= 2 * width
    ]
    for name in gains:
        fresh.module.get_parameter(name).data.fill_(1.0)
    seen = replace(flowing, built=fresh).said_twice()
    if not gains or _first(seen, 2 * half) is None or bool(halves_apart(seen, half) >= 1e3 * flowing.limit):
        return None
    return (
        f"with all gains of {', '.join(gains[:2])} the same it is right: the norm of queries and keys stands behind "
        "the rotation, where its gains weigh channels that were turned, and not before it"
    )


def halves_apart(seen: Traced, half: int) -> Tensor:
    """Return how far the scores of the first attention within the halves of a text are apart, relatively."""
    first = _first(seen, 2 * half)
    assert first is not None
    scores = first.factor[None, :, None, None] * (first.query @ first.key.transpose(-1, -2)) + first.bias
    one, other = scores[..., :half, :half], scores[..., half:, half:]
    both = ~(first.hidden[:, :half, :half] | first.hidden[:, half:, half:])
    off = torch.where(both, one - other, 0.0)
    # a number that is added to a whole row is nothing to a softmax, and of the bias none is known
    mean = off.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1)
    size = torch.where(both, one, 0.0).abs().amax().clamp(min=1e-300)
    return torch.where(both, off - mean, 0.0).abs().amax() / size


def _first(seen: Traced, length: int) -> Attention | None:
    found = [a for a in followed(seen) if a.is_over(length)]
    first = min(found, key=lambda a: a.when, default=None)
    return first if first is not None and bool(first.factor.isfinite().all()) else None
