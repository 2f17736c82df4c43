"""Numbers that mix positions inside a model and are no weights of its scores: no softmax, or scores of others."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import HIDDEN, attentions
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


def scores_are_of_one_layer(case: Case, flowing: Flow) -> None:
    """Ask where the weights of an attention follow its scores and those of attentions before it.

    What is added to scores is handed from layer to layer (a bias of positions) and written to in place, say. Residual
    attention (He et al. 2021) does so by design; where T5's bias or ALiBi's slopes are declared, these alone are added.
    """
    if case.subject.fact("structure") == "other" and case.subject.fact("positions") not in ("t5", "alibi"):
        return
    found = carried(flowing.seen)
    count = case.apply(carried_scores, flowing.seen)
    if not found:
        return
    place, before = ((name or "the model") for name in found[0])
    case.witness()
    case.require(
        count == 0,
        f"in {place} scores hold those of {before} too",
        got=f"weights that follow the scores of both, in {len(found)} attentions",
        expected="weights that follow the scores of one",
        cause=lambda: (
            f"the scores of {before} are in what is added to those of {place}: what layers share (a bias of "
            "positions, say) is written to in place"
        ),
        asks=("structure", "other"),
    )


def carried_scores(seen: Traced) -> Tensor:
    """Return how many attentions follow their own scores and those of others before them."""
    return torch.tensor(len(carried(seen)))


def carried(seen: Traced) -> list[tuple[str, str]]:
    """Return the attentions that follow their own scores and those of others before, with the place of one of them."""
    found, known = [], [a for a in attentions(seen) if a.over == "keys"]
    for number, one in enumerate(known):
        raw = one.query @ one.key.mT
        before = [a for a in known[:number] if a.weights.shape == one.weights.shape]
        earlier = [a.query @ a.key.mT for a in before]
        if not before or one.is_followed(seen.limit) or any(x.shape != raw.shape for x in earlier):
            continue
        limit = 100 * seen.limit * (1 + float(one.bias.abs().amax()))
        if _misfit(one.weights, [raw, *earlier]) <= limit < _misfit(one.weights, [raw]):
            found.append((one.place, before[-1].place))
    return found


def _misfit(weights: Tensor, scores: list[Tensor]) -> float:
    """Return the largest error of logarithms of weights `[B, H, T, S]`, fitted by scores and a bias of all samples."""
    visible = (weights > HIDDEN).all(0)
    count = visible.sum(-1, keepdim=True).clamp(min=1)

    def moved(x: Tensor) -> Tensor:
        x = torch.where(visible, x, 0.0)
        x = torch.where(visible, x - x.sum(-1, keepdim=True) / count, 0.0)
        return (x - x.mean(0)).transpose(0, 1).flatten(1)  # [H, B T S]

    wanted = moved(weights.clamp(min=HIDDEN).log())
    given = torch.stack([moved(x) for x in scores], dim=-1)
    factors = torch.linalg.lstsq(given, wanted[..., None]).solution
    return float(((given @ factors)[..., 0] - wanted).abs().amax())


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
