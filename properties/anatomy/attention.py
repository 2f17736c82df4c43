"""The attentions of a model, found by their weights: what they are made of, head by head, told by regression.

Rows that are not negative and sum to one, multiplied by something: weights and values. Before them a product of as many
numbers that their logarithms follow, up to one factor and one table a head: scores, their factor, bias and mask.
Neither names nor the order of operations matter, so that hand-written softmaxes, masks and scalings are seen alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from veriformer.properties.anatomy.traced import Product, Traced

_HIDDEN = 1e-25
"""Weights below are those of hidden keys: scores of models re-drawn to unit gain lie within some tens."""


@dataclass
class Head:
    """Where a head's queries or keys come from.

    Attributes:
        source: `[B, T, K]`: the part of an earlier product that it is, but for a factor and a rotation.
        factor: by which it was multiplied since.
        when: number of that product among the values.
        place: the module that made it.
        start: first channel of the part.
        step: from one of its channels to the next.
    """

    source: Tensor
    factor: float
    when: int
    place: str
    start: int
    step: int

    @property
    def channels(self) -> list[int]:
        """The channels of the product that it is."""
        return [self.start + n * self.step for n in range(self.source.shape[-1])]


@dataclass
class Attention:
    """One attention of a model.

    Attributes:
        place: path of the module that computes it.
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
    """

    place: str
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

    @property
    def scale(self) -> list[float | None]:
        """The whole factor on the products of projected queries and keys, by head; None where it is not known."""
        return [
            None if q is None or k is None or not bool(f.isfinite()) else float(f) * q.factor * k.factor
            for f, q, k in zip(self.factor, self.query_from, self.key_from, strict=True)
        ]


def attentions(seen: Traced, batch: int, limit: float) -> list[Attention]:
    """Return the attentions of a forward on some samples, in order.

    Args:
        seen: its trace.
        batch: number B of samples, which no other axis coincides with.
        limit: largest relative difference that is rounding.
    """
    found: list[Attention] = []
    used: set[int] = set()
    for number, product in enumerate(seen.products):
        for weights, value in ((product.left, product.right), (product.right.mT, product.left.mT)):
            if not _are_weights(weights, batch):
                continue
            scores = _scores_before(seen.products[:number], weights, used)
            if scores is None:
                continue
            if (one := _read(seen, scores, weights, value, product, batch, limit)) is not None:
                used.add(scores.when)
                found.append(one)
                break
    return found


def _are_weights(x: Tensor, batch: int) -> bool:
    """Whether a factor of a product holds rows of weights, several for each sample."""
    several = x.ndim >= 3 and min(x.shape[-2:]) >= 2 and x.shape[:-2].numel() % batch == 0
    if not several or not bool((x >= 0).all()):
        return False
    sums = x.double().sum(-1)
    return bool(((sums <= 1 + 1e-4) & (sums > 1e-3)).all()) and not bool((x == x.flatten()[0]).all())


def _scores_before(products: list[Product], weights: Tensor, used: set[int]) -> Product | None:
    """Return the last product before of as many numbers, with rows or columns as long."""
    for product in reversed(products):
        sizes = product.output.shape[-2:]
        fits = product.output.numel() == weights.numel() and weights.shape[-1] in sizes
        fits = fits and (weights.shape[-2] in sizes or max(sizes) % weights.shape[-2] == 0)
        if fits and product.when not in used and product.output.ndim >= 3:
            return product
    return None


def _read(
    seen: Traced, scores: Product, weights: Tensor, value: Tensor, product: Product, batch: int, limit: float
) -> Attention | None:
    """Return the attention that scores, weights and values belong to; None where they do not belong together."""
    query, key = scores.left.double(), scores.right.double().mT
    raw = query @ key.mT  # without what `baddbmm` adds or multiplies by
    if raw.shape[-1] != weights.shape[-1]:
        raw, query, key = raw.mT, key, query
    rows = raw.shape[-2]
    if (
        rows != weights.shape[-2] and rows % weights.shape[-2] == 0
    ):  # groups of heads that share keys, one behind another
        groups = rows // weights.shape[-2]
        query = query.unflatten(-2, (groups, -1))
        key = key.unsqueeze(-3).expand(*key.shape[:-2], groups, *key.shape[-2:])
    parts = [x.reshape(-1, *x.shape[-2:]).double() for x in (weights, raw.reshape(weights.shape), query, key, value)]
    if any(len(x) % batch for x in parts):
        return None  # a table of relative positions, say, that all samples share
    readings = []
    for is_head_first in (False, True) if len(parts[0]) > batch else (False,):
        w, r, q, k, v = (_by_sample(x, batch, is_head_first) for x in parts)
        factor, bias, misfit, hidden = _fitted(w, r)
        one = Attention(product.place, w, q, k, v, hidden, factor, bias, misfit, [], [], [], product.when)
        one = replace(
            one,
            query_from=[_source(seen, q[:, h], scores.when, limit) for h in range(q.shape[1])],
            key_from=[_source(seen, k[:, h], scores.when, limit) for h in range(k.shape[1])],
            value_from=[_source(seen, v[:, h], product.when, limit) for h in range(v.shape[1])],
        )
        readings.append(one)
        if all(h is not None for h in (*one.query_from, *one.key_from)):
            break
    return max(readings, key=lambda a: sum(h is not None for h in (*a.query_from, *a.key_from)))


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
    seen = (weights > _HIDDEN).all(0)  # [H, T, S]
    hidden = (weights <= _HIDDEN).all(0)
    count = seen.sum(-1, keepdim=True).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(seen, x, 0.0)
        return torch.where(seen, x - x.sum(-1, keepdim=True) / count, 0.0)

    logs, scores = centred(weights.clamp(min=_HIDDEN).log()), centred(raw)
    moved, given = logs - logs.mean(0), scores - scores.mean(0)
    square = given.square().sum((0, 2, 3))
    varies = square > 1e-12 * scores.square().sum((0, 2, 3))  # the same in all samples, nothing can be told
    factor = torch.where(varies, (moved * given).sum((0, 2, 3)) / square, torch.nan)
    left = moved - factor[:, None, None] * given
    bias = logs.mean(0) - factor[:, None, None] * scores.mean(0)
    return factor, bias, left.abs().amax((0, 2, 3)), hidden


def _source(seen: Traced, part: Tensor, before: int, limit: float) -> Head | None:
    """Return the part of an earlier product that a head's queries or keys `[B, T, K]` are, rotated and scaled or not.

    Rotations keep the norms of tokens: one number explains the norms of all tokens in the right part, and in no other.
    """
    batch, length, width = part.shape
    norms = part.norm(dim=-1).flatten()
    if not float(norms.min()) > 0 or float(norms.std() / norms.mean()) < 1e-3:
        return None  # of one norm: normalised, or nothing to tell by
    for value in reversed(seen.values[:before]):
        rows = value.output.numel() / (batch * length)
        if not _may_be_linear(value.name) or rows % width or rows < width:
            continue
        for tokens in _as_tokens(value.output.double(), batch, length):
            for start, step, source in _chunks(tokens, width):
                size = source.norm(dim=-1).flatten()
                factor = float((norms * size).sum() / size.square().sum().clamp(min=1e-300))
                if float((norms - factor * size).abs().max()) <= limit * float(norms.max()):
                    return Head(source, factor, value.when, value.place, start, step)
    return None


def _may_be_linear(name: str) -> bool:
    return name in ("mm", "bmm", "matmul", "addmm", "baddbmm", "add")


def _as_tokens(x: Tensor, batch: int, length: int) -> list[Tensor]:
    """Return `[B, T, W]` of what a linear map gave: samples first, or time first."""
    if x.ndim >= 3 and tuple(x.shape[:2]) == (length, batch):
        return [x.reshape(length, batch, -1).transpose(0, 1)]
    if x.ndim >= 3 and tuple(x.shape[:2]) == (batch, length):
        return [x.reshape(batch, length, -1)]
    if x.shape[-2] == batch * length or x.shape[0] == batch * length:
        flat = x.reshape(-1, batch * length, x.shape[-1]).transpose(0, 1).reshape(batch * length, -1)
        return [flat.unflatten(0, (batch, length)), flat.unflatten(0, (length, batch)).transpose(0, 1)]
    return []


def _chunks(tokens: Tensor, width: int) -> list[tuple[int, int, Tensor]]:
    """Return the parts of `[B, T, W]` that may be heads: first channel, step to the next, and the part."""
    count = tokens.shape[-1] // width
    found = []
    for step in (n for n in range(1, count + 1) if count % n == 0):
        blocks = tokens.unflatten(-1, (count // step, width, step))
        places = [(a, b) for a in range(count // step) for b in range(step)]
        found += [(a * width * step + b, step, blocks[..., a, :, b]) for a, b in places]
    return found
