"""How well each seed of a stack does: loss, accuracy, calibration."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from veriformer.ablations.tasks import IGNORED, Samples
from veriformer.ablations.training.stacking import Stack


def logits_of(stack: Stack, samples: Samples, size: int = 256) -> Tensor:
    """Return the logits `[seeds, B, ...]` of samples, `size` of them at a time."""
    total = samples.labels.shape[1]
    parts = [stack(*(x[:, i : i + size] for x in samples.inputs)) for i in range(0, total, size)]
    return torch.cat(parts, dim=1).float()


def loss_and_accuracy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return each seed's cross-entropy (nats) and accuracy; logits `[seeds, B, ..., C]`, labels `[seeds, B, ...]`."""
    seeds, judged = len(labels), labels != IGNORED
    loss = functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    count = judged.view(seeds, -1).sum(dim=1)
    right = (logits.detach().argmax(dim=-1) == labels) & judged
    return loss.view(seeds, -1).sum(dim=1) / count, right.view(seeds, -1).sum(dim=1) / count


def overconfidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean probability of the likeliest class less the accuracy, `[seeds]`: above 0 the model is too sure.

    The calibration error has no sign: it counts a modest model as it counts one that is too sure.
    """
    confidence, guess = logits.softmax(dim=-1).max(dim=-1)
    judged = labels != IGNORED
    over = torch.where(judged, confidence - (guess == labels).to(confidence), 0.0)
    return over.flatten(1).sum(dim=1) / judged.flatten(1).sum(dim=1)


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error `[seeds]` over bins of confidence (Guo et al. 2017, section 2)."""
    confidence, guess = logits.softmax(dim=-1).max(dim=-1)
    judged = labels != IGNORED
    errors = []
    for index in range(len(labels)):
        sure, right = confidence[index][judged[index]], (guess == labels)[index][judged[index]].float()
        place = (sure * bins).long().clamp(0, bins - 1)
        gaps = torch.zeros(bins, device=sure.device).index_add_(0, place, sure - right)
        errors.append(gaps.abs().sum() / len(sure))
    return torch.stack(errors)
