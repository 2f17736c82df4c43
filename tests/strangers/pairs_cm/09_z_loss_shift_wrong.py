"""Token loss with the z regulariser, ported from a TPU code base (stable form: the maximum is taken out first)."""
import torch

from veriformer.properties import Subject

Z = 0.02


def cross_entropy_with_z(logits, labels):
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    weights = (labels != -1).to(logits.dtype)
    ids = labels.clamp(min=0)
    peak = logits.detach().amax(-1, keepdim=True)
    shifted = logits - peak
    log_z = shifted.exp().sum(-1).log()
    nll = log_z - shifted.gather(-1, ids[..., None])[..., 0]
    nll = nll + Z * torch.square(log_z)
    return (nll * weights).sum() / weights.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    forward=lambda model, logits, labels: cross_entropy_with_z(logits, labels),
    declares={"z_loss": Z, "ignore_index": -1, "empty_loss": "zero"},
)

WHAT = 'The z term squares the log-sum-exp of the shifted logits, without the maximum that was taken out: it does not hold the level of the logits at all (line 18).'
