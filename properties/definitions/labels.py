"""How a loss must depend on its labels: on single ones, and on those that do not count."""

from __future__ import annotations

import torch
from torch import Tensor


def changed(labels: Tensor, pool: list[int]) -> list[Tensor]:
    """Return labels of which one each is another, at places of both samples.

    Args:
        labels: `[2, T]`, T of 4 and more.
        pool: labels to take.
    """
    found = []
    for sample, at in ((0, 1), (1, 1), (0, 2), (1, labels.shape[1] - 2)):
        other = labels.clone()
        other[sample, at] = pool[(pool.index(int(labels[sample, at])) + 1) % len(pool)]
        found.append(other)
    return found


def follows_labels(logits: Tensor, labels: Tensor, others: list[Tensor], losses: Tensor) -> Tensor:
    """Return whether a loss changes with single labels as the log likelihoods of their rows do, whatever else is in it.

    Label t belongs to row t, or to row t - 1, all of them alike.

    Args:
        logits: `[B, T, V]`.
        labels: `[B, T]`.
        others: labels of which one is another.
        losses: of the labels, then of each of the others.
    """
    log_p, changes, found = logits.double().log_softmax(-1), losses[0].double() - losses[1:].double(), False
    for offset in (0, 1):
        steps = []
        for other in others:
            ((sample, at),) = (other != labels).nonzero().tolist()
            row = log_p[sample, at - offset]
            steps.append(row[labels[sample, at]] - row[other[sample, at]])
        step = -torch.stack(steps)
        share = (step * changes).sum() / step.square().sum()
        found |= bool(share > 0 and (changes - share * step).abs().max() <= 0.02 * share * step.abs().max())
    return torch.tensor(found)


def mean_over_counted(logits: Tensor, labels: Tensor, offset: int, left_out: int) -> Tensor:
    """Return the mean of -log p(label) where row t is scored by label t + offset, over the labels but one.

    Args:
        logits: `[B, T, V]`.
        labels: `[B, T]`.
        offset: of the labels.
        left_out: the label that does not count.
    """
    rows, wanted = logits.double()[:, : logits.shape[1] - offset].log_softmax(-1), labels[:, offset:]
    counts = wanted != left_out
    return -rows[counts].gather(-1, wanted[counts][:, None]).mean()
