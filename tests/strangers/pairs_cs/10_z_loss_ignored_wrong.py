"""Cross-entropy with the z-loss of PaLM and T5X, ported from JAX: one log-sum-exp serves both terms."""
import torch

from veriformer.properties import Subject

IGNORE, Z_LOSS = -100, 0.02


def cross_entropy_with_z(model, logits, labels):
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    counted = labels != IGNORE
    weight = counted.to(logits.dtype)
    total = weight.sum().clamp(min=1.0)
    log_z = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    nll = ((log_z - picked) * weight).sum() / total
    z = log_z.square().mean()
    return nll + Z_LOSS * z


subject = Subject(
    kind="loss",
    name="cross-entropy with z-loss",
    forward=cross_entropy_with_z,
    declares={"z_loss": Z_LOSS, "empty_loss": "zero"},
)

WHAT = (
    'The z-loss is averaged over all positions, those with the ignored label too (line 17), while the cross-entropy is averaged over the labels that count.'
)
