"""The loss of a language model, written out in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def loss_oracle(
    logits: Tensor, labels: Tensor, label_smoothing: float, ignore_index: int, z_loss: float = 0.0
) -> Tensor:
    """Return the mean of the smoothed negative log likelihoods, position by position, in float64.

    Args:
        logits: `[B, T, V]`.
        labels: `[B, T]`.
        label_smoothing: share of the target that is spread over all V.
        ignore_index: label that is not counted.
        z_loss: factor of the square of the log of the softmax's sum (Chowdhery et al. 2022, section 5).
    """
    total, counted = 0.0, 0
    for row, label in zip(logits.detach().double().cpu().flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label == ignore_index:
            continue
        log_z = float(torch.logsumexp(row, 0))
        log_p = [float(x) - log_z for x in row]
        total += z_loss * log_z**2
        total -= (1 - label_smoothing) * log_p[label] + label_smoothing * sum(log_p) / len(log_p)
        counted += 1
    return torch.tensor(total / max(counted, 1), dtype=torch.float64, device=logits.device)


def loss_of_rows(
    logits: Tensor, labels: Tensor, label_smoothing: float, ignore_index: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what `loss_oracle` does, all positions at once, and its gradient; for many tokens and vocabularies.

    With q the smoothed target and n the number of counted positions, dL/dx_t = ((1 + 2 c log Z) softmax(x_t) - q_t) / n
    where t counts, and 0 elsewhere.

    Args:
        logits: `[B, T, V]`.
        labels: `[B, T]`.
        label_smoothing: as in `loss_oracle`.
        ignore_index: likewise.
        z_loss: likewise.

    Returns:
        The loss and its gradient `[B, T, V]`, float64.
    """
    wide, counted = logits.detach().double(), labels != ignore_index
    at, number = labels.masked_fill(~counted, 0)[..., None], max(int(counted.sum()), 1)
    log_z = wide.logsumexp(-1, keepdim=True)
    sharp, smooth = wide.gather(-1, at) - log_z, wide.mean(-1, keepdim=True) - log_z
    terms = z_loss * log_z.square() - (1 - label_smoothing) * sharp - label_smoothing * smooth
    gradient = (wide - log_z).exp() * (1 + 2 * z_loss * log_z) - label_smoothing / wide.shape[-1]
    gradient.scatter_add_(-1, at, torch.full_like(log_z, label_smoothing - 1))
    hidden = ~counted[..., None]
    return terms.masked_fill(hidden, 0).sum() / number, gradient.masked_fill(hidden, 0) / number


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
