"""Cross-entropy with the z-loss of PaLM and T5X, in logs throughout."""
import torch
from torch import Tensor
from veriformer.properties import Subject

Z = 1e-2


def cross_entropy_with_z(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(-1, keepdim=True).detach()
    shifted = logits - top
    log_sum = shifted.exp().sum(-1).log()  # of the shifted logits

    counted = labels >= 0
    target = labels.clamp(min=0)[..., None]
    nll = log_sum - shifted.gather(-1, target)[..., 0]

    log_z = log_sum
    per_token = nll + Z * log_z.square()
    return per_token[counted].sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="cross-entropy with z-loss",
    forward=lambda m, logits, labels: cross_entropy_with_z(logits, labels),
    declares={"z_loss": Z, "empty_loss": "zero"},
)

WHAT = (
    'Line 19: log Z is that of the logits from which the largest was subtracted; the maximum is not added back, so that the z-loss no longer sees how far the logits drift.'
)
