WHAT = "The z-loss squares the log of the sum of the shifted exponentials: the maximum that was subtracted for stability is not added back, so the level of the logits is not penalised (line 21)."
"""Cross-entropy and z-loss in one pass over the logits, by hand and stable."""

import torch

from veriformer.properties import Subject

Z = 0.1
IGNORE = -100


def cross_entropy_with_z_loss(logits, labels, z=Z):
    """Mean over the labels that count of  -log p(label) + z * log(Z)^2,  Z the sum of the softmax."""
    logits, labels = logits.flatten(0, -2), labels.flatten()
    counts = labels != IGNORE
    top = logits.detach().amax(dim=-1, keepdim=True)
    shifted = logits - top
    log_sum = shifted.exp().sum(dim=-1).log()
    picked = shifted.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    nll = log_sum - picked
    log_z = log_sum
    per_token = nll + z * log_z.square()
    return torch.where(counts, per_token, 0.0).sum() / counts.sum().clamp_min(1)


subject = Subject(
    kind="loss",
    name="cross-entropy with z-loss",
    forward=lambda model, logits, labels: cross_entropy_with_z_loss(logits, labels),
    declares={"z_loss": Z, "ignore_index": IGNORE, "empty_loss": "zero"},
)
