"""Cross-entropy with label smoothing and the z-loss of PaLM, over the labels that count."""

import torch

from veriformer.properties import Subject

SMOOTHING, Z = 0.1, 1e-2


def criterion(logits, labels, ignore=-100):
    counted = labels != ignore
    rows, gold = logits[counted], labels[counted]
    if gold.numel() == 0:
        return logits.sum() * 0.0
    log_z = rows.logsumexp(-1)
    nll = log_z - rows.gather(-1, gold[:, None]).squeeze(-1)
    spread = log_z - rows.mean(-1)
    cross_entropy = torch.lerp(nll, spread, SMOOTHING).mean()
    penalty = log_z.square().mean()
    return cross_entropy + Z * penalty


subject = Subject(
    kind="loss",
    forward=lambda model, logits, labels: criterion(logits, labels),
    declares={"label_smoothing": SMOOTHING, "z_loss": Z, "ignore_index": -100, "empty_loss": "zero"},
)
