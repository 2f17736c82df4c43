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
