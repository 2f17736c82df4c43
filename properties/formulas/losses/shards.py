"""Cross-entropy over a vocabulary in shards: slips in putting the shards' maxima, sums and label logits together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def sharded(logits: Tensor, labels: Tensor, eps: float) -> Iterator[tuple[str, Tensor]]:
    """Yield what shards that are put together wrongly give, each with its words: the loss of every position.

    Args:
        logits: `[B, T, V]` in float64.
        labels: `[B, T]`, of the vocabulary.
        eps: label smoothing.
    """
    for size in range(2, logits.shape[-1]):
        shards, starts = logits.split(size, -1), range(0, logits.shape[-1], size)
        for words, sums, label in _put_together(shards, starts, labels, logits):
            smooth = (sums - logits.mean(-1)) if eps else torch.zeros_like(sums)
            yield f"the vocabulary in shards of {size}: {words}", (1 - eps) * (sums - label) + eps * smooth
        if eps:
            yield from _smoothed(size, shards, logits, labels, eps)


def _put_together(
    shards: tuple[Tensor, ...], starts: range, labels: Tensor, logits: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield slips with the logarithm of the sum and the logit of the label that they take."""
    size = shards[0].shape[-1]
    sums = torch.stack([x.logsumexp(-1) for x in shards], -1)
    largest = torch.stack([x.amax(-1) for x in shards], -1)
    whole, top, own = logits.logsumexp(-1), logits.amax(-1), (labels // size)[..., None]
    label = logits.gather(-1, labels[..., None])[..., 0]
    of_own = largest.gather(-1, own)[..., 0]
    apart = (sums - largest).logsumexp(-1)
    maxima = "each subtracts a maximum of its own (the maximum over all is missing)"
    yield f"{maxima}, from the label's logit too", apart, label - of_own
    yield f"{maxima} before the sums are added", apart, label - top
    yield (
        "from the label's logit the maximum of its shard is taken, from the others that of all",
        whole - top,
        (label - of_own),
    )
    for words, others in (
        ("the logit nearest to the label", [(labels - s).clamp(0, x.shape[-1] - 1) for s, x in _with(starts, shards)]),
        (
            "its first logit",
            [torch.where((labels >= s) & (labels < s + size), labels - s, 0) for s, x in _with(starts, shards)],
        ),
    ):
        picked = sum(
            (x.gather(-1, at[..., None])[..., 0] for at, x in zip(others, shards, strict=True)), torch.zeros_like(top)
        )
        told = f"those without the label add {words} to its logit: they are not masked"
        yield told, whole, picked
        yield f"{told} (each less the maximum)", whole - top, picked - len(shards) * top
    yield "their log-sum-exps are added", sums.sum(-1), label
    yield "their log-sum-exps are averaged", sums.mean(-1), label
    yield "the largest of their log-sum-exps stands for that of all", sums.amax(-1), label
    yield "the softmax is taken within the label's shard alone", sums.gather(-1, own)[..., 0], label
    yield "the sum of the last shard alone is taken", sums[..., -1], label
    yield "the sum of the first shard alone is taken", sums[..., 0], label


def _with(starts: range, shards: tuple[Tensor, ...]) -> list[tuple[int, Tensor]]:
    return list(zip(starts, shards, strict=True))


def _smoothed(
    size: int, shards: tuple[Tensor, ...], logits: Tensor, labels: Tensor, eps: float
) -> Iterator[tuple[str, Tensor]]:
    whole = logits.logsumexp(-1)
    sharp = whole - logits.gather(-1, labels[..., None])[..., 0]
    means = torch.stack([x.mean(-1) for x in shards], -1)
    for words, mean in (
        ("the smoothing takes the mean of their means, of shards of unequal size alike", means.mean(-1)),
        ("the smoothing adds their means, which are not weighed by their sizes", means.sum(-1)),
        (
            "the smoothing takes the mean within the label's shard alone",
            means.gather(-1, (labels // size)[..., None])[..., 0],
        ),
        (
            "the smoothing takes the part of the label's shard alone of the mean over all",
            torch.stack([x.sum(-1) for x in shards], -1).gather(-1, (labels // size)[..., None])[..., 0]
            / logits.shape[-1],
        ),
    ):
        yield f"the vocabulary in shards of {size}: {words}", (1 - eps) * sharp + eps * (whole - mean)
