"""cross_entropy_with_logits as in T5X and MaxText: log of the partition function by hand, and a z-loss that keeps it near 0."""
import torch

from veriformer.properties import Subject

Z_LOSS = 1e-2
IGNORE = -100


def cross_entropy_with_logits(logits, targets, z_loss):
    """Per token: the cross-entropy plus z_loss * log_z ** 2."""
    max_logit = logits.amax(-1, keepdim=True).detach()
    shifted = logits - max_logit
    log_sum = torch.log(torch.exp(shifted).sum(-1))
    label_shifted = shifted.gather(-1, targets[..., None])[..., 0]
    nll = log_sum - label_shifted
    log_z = log_sum + max_logit[..., 0]
    return nll + z_loss * log_z.square()


def loss_fn(model, logits, labels):
    weights = labels != IGNORE
    per_token = cross_entropy_with_logits(logits, labels.clamp(min=0), Z_LOSS)
    per_token = torch.where(weights, per_token, torch.zeros_like(per_token))
    return per_token.sum() / weights.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="t5x loss",
    forward=loss_fn,
    declares={"z_loss": Z_LOSS, "ignore_index": IGNORE, "empty_loss": "zero"},
)
