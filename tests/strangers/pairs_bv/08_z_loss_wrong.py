WHAT = "the z term is averaged over all positions, ignored ones among them, whereas the cross entropy beside it counts the labelled ones alone (line 19: return nll + z * log_z.square().mean())"
import torch
import torch.nn as nn

from veriformer.properties import Subject


Z = 0.01


def lm_loss(logits, labels, ignore_index=-100, z=Z):
    logits = logits.flatten(0, 1)
    labels = labels.flatten()
    keep = (labels != ignore_index).to(logits.dtype)
    count = keep.sum().clamp(min=1)
    log_z = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    nll = ((log_z - picked) * keep).sum() / count
    return nll + z * log_z.square().mean()


subject = Subject(
    kind="loss",
    forward=lambda m, logits, labels: lm_loss(logits, labels),
    declares={"z_loss": Z, "ignore_index": -100, "empty_loss": "zero"},
)
