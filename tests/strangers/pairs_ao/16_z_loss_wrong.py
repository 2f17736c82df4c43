WHAT = "the z-loss is averaged over all positions, ignored labels included, while the cross-entropy leaves them out (line 22)."
"""Cross-entropy and z-loss from one log-sum-exp."""

import torch

from veriformer.properties import Subject

IGNORE = -100
Z = 0.01


def fused_loss(logits, labels):
    flat = logits.flatten(0, -2)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    target = labels.flatten()
    counted = target != IGNORE
    n = counted.sum().clamp(min=1)
    lse = flat.logsumexp(-1)
    picked = flat.gather(1, target.masked_fill(~counted, 0)[:, None]).squeeze(1)
    nll = (lse - picked).masked_fill(~counted, 0.0).sum() / n
    z = lse.square().mean()
    return (nll + Z * z).to(logits.dtype)


subject = Subject(
    kind="loss",
    name="cross-entropy with z-loss",
    forward=lambda model, logits, labels: fused_loss(logits, labels),
    declares={"ignore_index": IGNORE, "z_loss": Z, "label_smoothing": 0.0, "shifts_labels": False, "empty_loss": "zero"},
)
