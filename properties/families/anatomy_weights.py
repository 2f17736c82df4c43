"""Numbers that mix positions inside a model and are no weights: scores that no softmax has seen."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.flow import Flow
from veriformer.properties.anatomy.traced import Product, Traced
from veriformer.properties.engine.case import Case

_NEGATIVE = 1e-3
"""Of the largest of its numbers; what rounding leaves below 0 is far smaller."""


def scores_pass_a_softmax(case: Case, flowing: Flow) -> None:
    """Ask where values are weighed by numbers that depend on the content and are negative here and there.

    Weights of a softmax that is divided out behind the product are positive. Those of differential attention and of
    mixed heads sum to one number in all rows of a head. Kernels with signed features, and what decays without a norm,
    have such numbers by design.
    """
    if case.subject.fact("structure") == "other":
        return
    odd = signed(flowing.seen, flowing.length)
    if any(decays(flowing.seen, one) for one in odd):
        return
    count = case.apply(signed_weights, flowing.seen, flowing.length)
    if not odd:
        return
    place, least = odd[0].place or "the model", float(odd[0].left.min())
    case.witness()
    case.require(
        count == 0,
        f"in {place} values are weighed by numbers that are no weights",
        got=f"numbers down to {least:.4g}, normalised over no axis, in {len(odd)} products",
        expected="weights of 0 or more, of which each row sums to 1",
        cause=lambda: f"no softmax acts between the scores and the values in {place}",
        asks=("structure", "other"),
    )


def signed_weights(seen: Traced, length: int) -> Tensor:
    """Return how many products weigh as many positions by numbers of both signs."""
    return torch.tensor(len(signed(seen, length)))


def signed(seen: Traced, length: int) -> list[Product]:
    """Return the products whose left factor, `[..., T, T]`, has both signs and is another for each sample."""
    return [p for p in seen.products if _mixes(p, length) and _is_signed(p.left, seen.batch)]


def decays(seen: Traced, weights: Product) -> bool:
    """Whether numbers are products of queries and keys times something that falls with their distance (retention)."""
    for scores in (p for p in seen.products if p.when < weights.when and p.output.numel() == weights.left.numel()):
        share = weights.left.double() / scores.output.reshape(weights.left.shape).double()
        near, far = (share.diagonal(-d, -2, -1) for d in (0, 1))
        steady = all(bool((x - x.mean()).abs().amax() < 1e-4 * x.abs().mean()) for x in (near[0], far[0]))
        if steady and bool((far.abs().mean() < 0.9999 * near.abs().mean()).all()):
            return True
    return False


def _mixes(product: Product, length: int) -> bool:
    is_square = product.left.ndim >= 3 and product.left.shape[-2:] == (length, length)
    return is_square and product.right.shape[-2] == length != product.right.shape[-1]


def _is_signed(x: Tensor, batch: int) -> bool:
    if len(x) % batch or not bool(x.isfinite().all()):
        return False
    by_sample = x.reshape(batch, -1)
    is_content = not bool((by_sample == by_sample[:1]).all())
    rows = x.sum(-1)
    is_normalised = bool(((rows - rows.mean(-1, keepdim=True)).abs() < 1e-2 * rows.abs().mean(-1, keepdim=True)).all())
    return is_content and not is_normalised and float(x.min()) < -_NEGATIVE * float(x.abs().max())
