"""Scores that are capped inside whole models; part of `anatomy.scale`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, attentions
from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.traced import Traced
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.facts import attention_scale


def scores_are_capped(case: Case, flowing: Flow, cap: float) -> None:
    """Require that weights follow c tanh(s q k^T / c), with the declared cap and scale."""
    if case.subject.fact("positions") in ("alibi", "t5", "relative"):
        case.does_not_apply("scores have a bias by position besides a cap")
    scale = case.subject.fact("attention_scale")
    known = _traced_back(flowing.seen)
    if not known:
        case.does_not_apply("no attention could be followed from its projections to its weights")
    for number, attention in enumerate(known):
        own = attention_scale(scale, attention.query.shape[-1], flowing.width)
        off = case.apply(capped_misfit, flowing.seen, number, own, cap)
        place = attention.place or "the model"
        case.witness()
        case.require(
            off < 1e2 * flowing.limit,
            f"the weights in {place} are not those of scores capped at {cap:g}",
            got=f"logarithms of weights {float(off):.3g} off",
            expected=f"softmax of {cap:g} tanh({own:.4g} q k^T / {cap:g})",
            error=off,
            tolerance=1e2 * flowing.limit,
            cause=lambda a=attention, s=own, p=place: _cause(a, s, cap, p),  # type: ignore[misc]
        )


def capped_misfit(seen: Traced, number: int, scale: float, cap: float) -> Tensor:
    """Return the largest error, in logarithms of weights, of capped scores in one of the attentions."""
    return _misfit(_traced_back(seen)[number], lambda x: cap * (scale * x / cap).tanh())


def _traced_back(seen: Traced) -> list[Attention]:
    return [a for a in attentions(seen) if a.over == "keys" and all((*a.query_from, *a.key_from))]


def _misfit(a: Attention, scores: Callable[[Tensor], Tensor]) -> Tensor:
    """Return how far the weights are from a softmax of scores of the projected queries and keys."""
    factors = [q.factor * k.factor for q, k in zip(a.query_from, a.key_from, strict=True) if q and k]
    raw = (a.query @ a.key.mT) / torch.tensor(factors, dtype=torch.float64)[:, None, None]
    seen = (~a.hidden).expand_as(a.weights)
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    off = torch.where(seen, a.weights.clamp(min=1e-30).log() - scores(raw), 0.0)
    return torch.where(seen, off - off.sum(-1, keepdim=True) / count, 0.0).abs().amax()


def _cause(a: Attention, scale: float, cap: float, place: str) -> str | None:
    """Say what the scores are instead."""
    guesses: dict[str, Callable[[Tensor], Tensor]] = {
        f"in {place} the cap acts before the scale: {cap:g} tanh(q k^T / {cap:g}) is scaled": (
            lambda x: scale * cap * (x / cap).tanh()
        ),
        f"in {place} nothing is capped": lambda x: scale * x,
        f"in {place} scores are capped and not scaled": lambda x: cap * (x / cap).tanh(),
        f"in {place} scores are scaled twice before they are capped": lambda x: cap * (scale * scale * x / cap).tanh(),
        f"in {place} scores are not divided by the cap before the tanh": lambda x: cap * (scale * x).tanh(),
        f"in {place} what the tanh gives is not multiplied by the cap": lambda x: (scale * x / cap).tanh(),
    }
    named = [words for words, guess in guesses.items() if float(_misfit(a, guess)) < 1e-4]
    if named:
        return named[0]
    for other in (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 50.0, 100.0):
        if float(_misfit(a, lambda x, c=other: c * (scale * x / c).tanh())) < 1e-6:  # type: ignore[misc]
            return f"in {place} scores are capped at {other:g}"
    return None
