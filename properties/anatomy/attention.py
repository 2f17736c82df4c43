"""The attentions of a model, found by their weights: what they are made of, head by head, told by regression.

Rows that are not negative and sum to one number, multiplied by something: weights and values. Before them a product of
as many numbers that their logarithms follow, up to one factor and one table a head: scores, their factor, bias and
mask. Neither names nor the order of operations matter, so that hand-written softmaxes, masks and scalings are seen
alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from veriformer.properties.anatomy.sources import Head, sources_of
from veriformer.properties.anatomy.traced import Product, Traced

HIDDEN = 1e-25
"""Weights below are those of hidden keys: scores of models re-drawn to unit gain lie within some tens."""

_MARGIN = 10.0  # in logarithms: by how much a bias may lower the weight of a key that is next to nothing without one

_SUM = 1e-4
"""Sums of weights that differ by no more are one number: softmaxes are computed in float32 in most models."""


@dataclass
class Attention:
    """One attention of a model.

    Attributes:
        place: path of the module that computes it.
        over: "keys", or "queries" where the columns of its weights sum to one and its rows do not.
        weights: `[B, H, T, S]`, float64.
        query: `[B, H, T, K]`, as it enters the scores.
        key: `[B, H, S, K]`.
        value: `[B, H, S, E]`.
        hidden: `[H, T, S]`: which keys no sample's query sees.
        factor: `[H]`: the weights follow `factor q k^T + bias`; NaN where nothing follows.
        bias: `[H, T, S]`, of mean 0 over the keys that a row sees.
        misfit: `[H]`: largest error of that, in logarithms of weights.
        query_from: where each head's queries come from; None where that is not known.
        key_from: where its keys do.
        value_from: where its values do.
        when: number of its output among the values.
        filled: channels of a head as it enters the scores, zeros among them that fill it up.
    """

    place: str
    over: str
    weights: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    factor: Tensor
    bias: Tensor
    misfit: Tensor
    query_from: list[Head | None]
    key_from: list[Head | None]
    value_from: list[Head | None]
    when: int
    filled: int = 0

    @property
    def scale(self) -> list[float | None]:
        """The whole factor on the products of projected queries and keys, by head; None where it is not known."""
        return [
            None if q is None or k is None or not bool(f.isfinite()) else float(f) * q.factor * k.factor
            for f, q, k in zip(self.factor, self.query_from, self.key_from, strict=True)
        ]

    def is_followed(self, limit: float) -> bool:
        """Whether the weights of every head follow its scores, up to rounding."""
        return bool((self.misfit <= 10 * limit * (1 + self.bias.abs().amax((1, 2)))).all())

    def is_over(self, *lengths: int) -> bool:
        """Whether it is that of a sequence of one of these lengths over itself."""
        _, queries, keys = self.hidden.shape
        return queries == keys and queries in lengths


def attentions(seen: Traced) -> list[Attention]:
    """Return the attentions of a forward, in order; of some the weights may not follow the scores."""
    found: list[Attention] = seen.once("attentions", lambda: _attentions(seen))
    return found


def followed(seen: Traced) -> list[Attention]:
    """Return the attentions of which the weights follow the scores, in order."""
    return [a for a in attentions(seen) if a.is_followed(seen.limit)]


def _attentions(seen: Traced) -> list[Attention]:
    found: list[Attention] = []
    used: set[int] = set()
    for number, product in enumerate(seen.products):
        forms = ((product.left, product.right), (product.right.mT, product.left.mT))
        named = [(_normalised_over(weights, seen.batch), weights, value) for weights, value in forms]
        for over, weights, value in sorted((n for n in named if n[0]), key=lambda n: n[0]):
            candidates = []
            for scores in _scores_before(seen.products[:number], weights, used):
                if readings := _readings(seen, scores, weights, value, product, over):
                    candidates.append((scores.when, readings))
                    if _fits(readings, seen.limit):
                        break
            if not candidates:
                continue
            scored, readings = candidates[-1] if _fits(candidates[-1][1], seen.limit) else candidates[0]
            if over == "keys" or _fits(readings, seen.limit):
                used.add(scored)
                found.append(_with_sources(seen, readings, scored))
                break
    return found


def _fits(readings: list[Attention], limit: float) -> bool:
    return any(one.is_followed(limit) for one in readings)


def _normalised_over(x: Tensor, batch: int) -> str:
    """Return whether a factor of a product holds weights over its rows ("keys") or columns; "" for neither."""
    several = x.ndim >= 3 and min(x.shape[-2:]) >= 2 and x.shape[:-2].numel() % batch == 0
    if not several or not bool((x >= 0).all()) or bool((x == x.flatten()[0]).all()):
        return ""
    wide = x.double()
    rows, columns = wide.sum(-1), wide.sum(-2)
    is_one_number = bool((rows - rows.mean()).abs().amax() <= _SUM * rows.mean())
    if bool((rows > 1e-3).all()) and (bool((rows <= 1 + _SUM).all()) or is_one_number):
        return "keys"
    return "queries" if bool(((columns - 1).abs() <= _SUM).all()) else ""


def _scores_before(products: list[Product], weights: Tensor, used: set[int]) -> list[Product]:
    """Return the products before of as many numbers, with rows or columns as long, the last one first."""
    found = []
    for product in reversed(products):
        sizes = product.output.shape[-2:]
        fits = product.output.numel() == weights.numel() and weights.shape[-1] in sizes
        fits = fits and (weights.shape[-2] in sizes or max(sizes) % weights.shape[-2] == 0)
        if fits and product.when not in used and product.output.ndim >= 3:
            found.append(product)
    return found


def _readings(
    seen: Traced, scores: Product, weights: Tensor, value: Tensor, product: Product, over: str
) -> list[Attention]:
    """Return an attention of scores, weights and values, without sources: with samples before heads, and behind them.

    None where these do not belong together.
    """
    query, key = scores.left.cpu().double(), scores.right.cpu().double().mT
    length = weights.shape[-1]
    found: list[Attention] = []
    # without what `baddbmm` adds or multiplies by; keys may stand before queries, which a square does not show
    for q, k in ((query, key), (key, query)):
        if k.shape[-2] == length and not _fits(found, seen.limit):
            found += _laid_out(seen, q, k, weights, value, product, over)
    return found


def _laid_out(
    seen: Traced, query: Tensor, key: Tensor, weights: Tensor, value: Tensor, product: Product, over: str
) -> list[Attention]:
    raw = query @ key.mT
    groups, rest = divmod(raw.shape[-2], weights.shape[-2])
    if groups > 1 and not rest:  # heads that share keys stand one behind another
        query = query.unflatten(-2, (groups, -1))
        key = key.unsqueeze(-3).expand(*key.shape[:-2], groups, *key.shape[-2:])
    found = []
    for arranged in _unstacked(weights, raw.reshape(weights.shape), query, key, value):
        parts = [x.reshape(-1, *x.shape[-2:]).double() for x in arranged]
        if any(len(x) % seen.batch for x in parts):
            return []  # a table of relative positions, say, that all samples share
        for is_head_first in (False, True) if len(parts[0]) > seen.batch else (False,):
            w, r, q, k, v = (_by_sample(x, seen.batch, is_head_first) for x in parts)
            filled = q.shape[-1]
            q, k, v = _without_zeros(q, k), _without_zeros(k, q), _without_zeros(v)
            factor, bias, misfit, hidden = _fitted(w, r) if over == "keys" else _fitted(w.mT, r.mT)
            if over == "queries":
                bias, hidden = bias.mT, hidden.mT
            told = (w, q, k, v, hidden, factor, bias, misfit)
            found.append(Attention(product.place, over, *told, [], [], [], product.when, filled))
    return found


def _unstacked(weights: Tensor, raw: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield an attention with its heads apart, where the rows of several that share keys are those of one matrix.

    An einsum of queries `[B, H, T, K]` and keys `[B, S, K]` is one product of `[B, H T, K]`, or of `[B, T H, K]`; a
    sequence over itself has as many queries as keys.
    """
    many, rest = divmod(weights.shape[-2], weights.shape[-1])
    if rest or many < 2 or query.shape[-2] != weights.shape[-2] or value.ndim != key.ndim:
        yield weights, raw, query, key, value
        return
    shared = [x.unsqueeze(-3).expand(*x.shape[:-2], many, *x.shape[-2:]) for x in (key, value)]

    def apart(x: Tensor, *, by_turns: bool) -> Tensor:
        return x.unflatten(-2, (-1, many)).transpose(-3, -2) if by_turns else x.unflatten(-2, (many, -1))

    # the rows of the second product may stand in another order than those of the first
    for first, second in ((False, False), (True, True), (False, True), (True, False)):
        yield apart(weights, by_turns=second), *(apart(x, by_turns=first) for x in (raw, query)), *shared


def _without_zeros(x: Tensor, *beside: Tensor) -> Tensor:
    """Return heads without channels behind the last that is not zero, which a fused kernel's widths are filled with."""
    used = torch.stack([(y != 0).flatten(0, -2).any(0) for y in (x, *beside)]).any(0)
    return x[..., : int(used.nonzero().amax()) + 1] if bool(used.any()) else x


def _with_sources(seen: Traced, readings: list[Attention], scored: int) -> Attention:
    """Return the reading of which most is known, with where its heads come from.

    Args:
        seen: the trace of a forward.
        readings: of one attention.
        scored: number of its scores among the values.
    """
    found = []
    nearest = sorted(readings, key=lambda r: float(r.misfit.nan_to_num(torch.inf).amax()))
    for one in [r for r in readings if r.is_followed(seen.limit)] or nearest:
        query, key = (sources_of(seen, x, scored) for x in (one.query, one.key))
        value = sources_of(seen, one.value, one.when)
        found.append(replace(one, query_from=query, key_from=key, value_from=value))
        if all(h is not None for h in (*query, *key)):
            break
    return max(found, key=lambda a: sum(h is not None for h in (*a.query_from, *a.key_from)))


def _by_sample(x: Tensor, batch: int, is_head_first: bool) -> Tensor:
    """Return `[B, H, ...]` of `[B H, ...]` or `[H B, ...]`."""
    count = x.shape[0] // batch
    return x.unflatten(0, (count, batch)).transpose(0, 1) if is_head_first else x.unflatten(0, (batch, count))


def _fitted(weights: Tensor, raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fit `log weights = factor raw + bias + a constant a row`, with a bias that is the same for all samples.

    Args:
        weights: `[B, H, T, S]`.
        raw: `[B, H, T, S]`.

    Returns:
        Factor `[H]`, bias `[H, T, S]`, largest error `[H]`, and `[H, T, S]`: what no sample sees.
    """
    seen = (weights > HIDDEN).all(0)  # [H, T, S]
    hidden = (weights <= HIDDEN).all(0)
    count = seen.sum(-1, keepdim=True).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(seen, x, 0.0)
        return torch.where(seen, x - x.sum(-1, keepdim=True) / count, 0.0)

    logs, scores = centred(weights.clamp(min=HIDDEN).log()), centred(raw)
    moved, given = logs - logs.mean(0), scores - scores.mean(0)
    square = given.square().sum((0, 2, 3))
    varies = square > 1e-12 * scores.square().sum((0, 2, 3))  # the same in all samples, nothing can be told
    factor = torch.where(varies, (moved * given).sum((0, 2, 3)) / square, torch.nan)
    left = moved - factor[:, None, None] * given
    bias = logs.mean(0) - factor[:, None, None] * scores.mean(0)
    # a key may get next to nothing for its scores alone: no mask is needed to hide it
    usual = factor[:, None, None] * raw
    top = weights.argmax(-1, keepdim=True)
    usual += (weights.clamp(min=HIDDEN).log() - usual).gather(-1, top)
    hidden &= ~(usual < math.log(HIDDEN) + _MARGIN).all(0)
    return factor, bias, left.abs().amax((0, 2, 3)), hidden


def is_part_of_rows(seen: Traced, attention: Attention) -> bool:
    """Whether another product holds the rest of every row: local and global keys, say, of one softmax."""
    sums = attention.weights.sum(-1)
    lengths = sums.shape[-1] * sums.shape[1]
    for product in seen.products:
        for x in (product.left, product.right.mT):
            if x.ndim < 3 or x.shape[:-1].numel() != len(sums) * lengths or product.when == attention.when:
                continue
            rest = x.cpu().double().sum(-1).reshape(len(sums), -1)
            if bool((x >= 0).all()) and float((sums.flatten(1) + rest - 1).abs().amax()) <= _SUM:
                return True
    return False


def past(bias: Tensor, visible: Tensor) -> Tensor:
    """Return a bias `[H, T, T]` at the visible keys at or before each query, of mean 0 in each row; 0 elsewhere."""
    kept = visible & torch.ones_like(visible).tril()
    middle = torch.where(kept, bias, 0.0).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(kept, bias - middle, 0.0)
