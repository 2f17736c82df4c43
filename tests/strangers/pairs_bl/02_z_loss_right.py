"""Pre-training loss: cross entropy with label smoothing and an auxiliary z-loss that keeps log Z near zero."""

import torch

from veriformer.properties import Subject

IGNORE = -100
SMOOTHING = 0.1
Z_LOSS = 0.02


def token_loss(logits, labels, smoothing=SMOOTHING, z_weight=Z_LOSS):
    keep = labels.ne(IGNORE)
    logits, labels = logits[keep], labels[keep]
    n_tokens = max(labels.numel(), 1)

    log_z = logits.logsumexp(dim=-1)
    picked = logits.gather(-1, labels[:, None])[:, 0]
    nll = (log_z - picked).sum() / n_tokens
    uniform = (log_z - logits.mean(dim=-1)).sum() / n_tokens
    z_term = log_z.square().sum() / n_tokens
    return (1.0 - smoothing) * nll + smoothing * uniform + z_weight * z_term


subject = Subject(
    kind="loss",
    name="smoothed cross entropy with z-loss",
    build=lambda c: None,
    forward=lambda m, logits, labels: token_loss(logits, labels),
    declares={"label_smoothing": SMOOTHING, "z_loss": Z_LOSS, "ignore_index": IGNORE, "empty_loss": "zero"},
)
