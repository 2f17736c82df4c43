"""Cross-entropy with PaLM's z-loss."""

import torch

from veriformer.properties import Subject

Z = 1e-4


def loss(log_normaliser):
    def cross_entropy(model, logits, labels):
        counted = labels != -100
        peak = logits.amax(-1, keepdim=True).detach()
        shifted = logits - peak
        log_sum = shifted.exp().sum(-1).log()
        picked = shifted.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        per_token = log_sum - picked + Z * log_normaliser(log_sum, peak.squeeze(-1)) ** 2
        return torch.where(counted, per_token, 0.0).sum() / counted.sum().clamp(min=1)

    return cross_entropy


def subject(log_normaliser):
    return Subject(
        kind="loss",
        name="palm loss",
        forward=loss(log_normaliser),
        declares={"z_loss": Z, "ignore_index": -100, "empty_loss": "zero", "shifts_labels": False},
    )


right = subject(lambda log_sum, peak: log_sum + peak)
wrong = subject(lambda log_sum, peak: log_sum)
WHAT = "the z-loss takes log Z of the logits after their maximum was subtracted, so it does not hold the logits down"
CAUSE = (
    "The z term uses the log-sum-exp of the stabilised logits (the maximum is not added back), so it does not see a constant "
    "added to all logits."
)
