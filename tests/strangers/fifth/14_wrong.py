"""Cross-entropy with the z-loss of PaLM, c * log(Z)^2, the logarithm of the sum written out."""

import torch

from veriformer.properties import Subject

Z_COEFFICIENT = 0.01
IGNORE = -100


def cross_entropy_with_z_loss(logits, labels, z_coefficient=Z_COEFFICIENT, ignore_index=IGNORE):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = labels != ignore_index
    logits, targets = logits[counted], labels[counted]

    # the largest logit is taken out, so that nothing overflows
    max_logit = logits.amax(dim=-1, keepdim=True).detach()
    shifted = logits - max_logit
    log_sum = torch.log(torch.exp(shifted).sum(dim=-1))
    nll = log_sum - shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    loss = nll + z_coefficient * log_sum.square()

    return loss.sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="cross-entropy with z-loss",
    forward=lambda model, logits, labels: cross_entropy_with_z_loss(logits, labels),
    declares={
        "z_loss": Z_COEFFICIENT,
        "ignore_index": IGNORE,
        "label_smoothing": 0.0,
        "shifts_labels": False,
        "empty_loss": "zero",
    },
)
