"""Faults of softmaxes that are taken block by block, and of losses whose vocabulary is in shards."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

_BLOCK = 8
_SHARD = 4


@fault(
    "SM-late-rescaling",
    "The sum so far is rescaled to a new maximum after the block of that maximum was added to it",
    killed_by=("softmax.long-rows",),
    cause="only after the new block was added to it",
)
def sums_rescaled_late() -> Subject:
    def after(total: Tensor, block: Tensor, factor: Tensor) -> Tensor:
        return (total + block) * factor

    def before(total: Tensor, block: Tensor, factor: Tensor) -> Tensor:
        return total * factor + block

    added = put(after, instead_of=before)

    def softmax(model: None, scores: Tensor, dim: int) -> Tensor:
        x = scores.movedim(dim, -1)
        x = x if x.dtype == torch.float64 else x.float()
        first, *rest = x.split(_BLOCK, dim=-1)
        top = first.detach().amax(-1, keepdim=True)
        total = (first - _finite(top)).exp().sum(-1, keepdim=True)
        for block in rest:
            new = torch.maximum(top, block.detach().amax(-1, keepdim=True))
            total = added(total, (block - _finite(new)).exp().sum(-1, keepdim=True), (top - _finite(new)).exp())
            top = new
        return ((x - _finite(top)).exp() / total).to(scores.dtype).movedim(-1, dim)

    return Subject(kind="softmax", forward=softmax, declares={"empty_row": "nan"})


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0.0)


@fault(
    "SC-values-not-rescaled",
    "Where a block of keys raises the maximum the sum of the exponentials is rescaled, that of the values is not",
    killed_by=("attention.tiles", "attention.definition"),
    cause="the sum of the weighed values is not rescaled where a block raises the maximum",
)
def values_are_not_rescaled() -> Subject:
    of_values = put(lambda factor: torch.ones_like(factor), instead_of=lambda factor: factor)

    def attend(m: None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q[..., :1] * v[..., :1, :])
        total = torch.zeros_like(q[..., :1])
        top = torch.full_like(total, -torch.inf)
        for start in range(0, k.shape[-2], _BLOCK):
            scores = q @ k[..., start : start + _BLOCK, :].mT * q.shape[-1] ** -0.5
            new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            factor, p = (top - new).exp(), (scores - new).exp()
            kept = of_values(factor) if start else factor
            total, out, top = (
                total * factor + p.sum(-1, keepdim=True),
                out * kept + p @ v[..., start : start + _BLOCK, :],
                new,
            )
        return out / total

    return Subject(kind="attention", forward=attend)


@fault(
    "SC-base-2-merge",
    "Parts of the keys are merged by exp of log-sum-exps that are in base 2",
    killed_by=("attention.definition",),
    cause="log-sum-exps that are in base 2, where exp2 belongs to them",
)
def parts_merged_in_another_base() -> Subject:
    weighed = put(torch.exp, instead_of=torch.exp2)

    def attend(m: None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs, sums = [], []
        size = -(-k.shape[-2] // 2)
        for start in range(0, k.shape[-2], size):
            scores = q @ k[..., start : start + size, :].mT * q.shape[-1] ** -0.5
            outs.append(scores.softmax(-1) @ v[..., start : start + size, :])
            sums.append(scores.logsumexp(-1, keepdim=True) / math.log(2))
        parts = torch.cat(sums, -1)
        shares = weighed(parts - parts.amax(-1, keepdim=True))
        shares = shares / shares.sum(-1, keepdim=True)
        return sum((shares[..., n : n + 1] * out for n, out in enumerate(outs)), torch.zeros_like(outs[0]))

    return Subject(kind="attention", forward=attend)


@fault(
    "LS-z-below-maximum",
    "The z-loss squares the logarithm of the sum of exp(x - max), to which the maximum is not added back",
    killed_by=("loss.definition",),
    cause="to which the maximum is not added back",
)
def z_loss_below_the_maximum() -> Subject:
    log_z = put(lambda below, top: below, instead_of=lambda below, top: below + top)

    def loss(m: None, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.flatten(0, -2), labels.flatten()
        top = logits.detach().amax(-1)
        below = (logits - top[:, None]).exp().sum(-1).log()
        z = log_z(below, top).square()[labels != -100].mean()
        return F.cross_entropy(logits, labels) + 0.01 * z

    return Subject(kind="loss", forward=loss, declares={"z_loss": 0.01, "empty_loss": "nan"})


def _sharded(
    maxima: Callable[[list[Tensor]], list[Tensor]], label: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[None, Tensor, Tensor], Tensor]:
    """Return a cross-entropy whose vocabulary is in shards: what their maxima and the logits of a label become."""

    def loss(m: None, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.flatten(0, -2), labels.flatten()
        shards = logits.split(_SHARD, -1)
        tops = maxima([x.detach().amax(-1) for x in shards])
        below = [x - top[:, None] for x, top in zip(shards, tops, strict=True)]
        total = sum((x.exp().sum(-1) for x in below), torch.zeros_like(tops[0]))
        wanted = torch.zeros_like(tops[0])
        for start, x in zip(range(0, logits.shape[-1], _SHARD), below, strict=True):
            at = (labels - start).clamp(0, x.shape[-1] - 1)
            here = (labels >= start) & (labels < start + _SHARD)
            wanted = wanted + label(x.gather(-1, at[:, None])[:, 0], here)
        return (total.log() - wanted)[labels != -100].mean()

    return loss


def _of_all(tops: list[Tensor]) -> list[Tensor]:
    return [torch.stack(tops).amax(0)] * len(tops)


def _masked(logit: Tensor, here: Tensor) -> Tensor:
    return torch.where(here, logit, 0)


@fault(
    "LS-shard-maxima",
    "Each shard of the vocabulary subtracts its own maximum before the sums of the shards are added",
    killed_by=("loss.definition",),
    cause="the maximum over all is missing",
)
def every_shard_has_its_own_maximum() -> Subject:
    maxima = put(lambda tops: tops, instead_of=_of_all)
    return Subject(kind="loss", forward=_sharded(maxima, _masked), declares={"empty_loss": "nan"})


@fault(
    "LS-shard-labels",
    "Shards of the vocabulary that do not hold the label add the logit nearest to it",
    killed_by=("loss.definition",),
    cause="those without the label add the logit nearest to the label",
)
def shards_without_the_label_add_to_it() -> Subject:
    label = put(lambda logit, here: logit, instead_of=_masked)
    return Subject(kind="loss", forward=_sharded(_of_all, label), declares={"empty_loss": "nan"})
