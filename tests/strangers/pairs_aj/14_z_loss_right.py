"""Cross-entropy with PaLM's auxiliary z-loss, in one function."""

import torch

from veriformer.properties import Subject

IGNORE = -100
Z_LOSS = 1e-3


def cross_entropy_with_z(logits, labels, ignore_index=IGNORE, z_loss=Z_LOSS):
    logits = logits.reshape(-1, logits.size(-1))
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    labels = labels.reshape(-1)

    counted = labels != ignore_index
    target = labels.masked_fill(~counted, 0)

    top = logits.detach().amax(dim=-1, keepdim=True)
    shifted = logits - top
    log_sum = shifted.exp().sum(dim=-1).log()
    nll = log_sum - shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    log_z = log_sum + top.squeeze(-1)
    per_token = nll + z_loss * log_z.square()
    per_token = per_token.masked_fill(~counted, 0.0)
    return per_token.sum() / counted.sum().clamp_min(1)


subject = Subject(
    kind="loss",
    name="cross-entropy with z-loss",
    forward=lambda model, logits, labels: cross_entropy_with_z(logits, labels),
    declares={"ignore_index": IGNORE, "z_loss": Z_LOSS, "empty_loss": "zero", "shifts_labels": False},
)
