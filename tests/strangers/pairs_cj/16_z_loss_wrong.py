"""Cross-entropy with PaLM's z-loss, from one log-sum-exp."""
import torch

from veriformer.properties import Subject

IGNORE, Z = -100, 1e-2


def loss(model, logits, labels):
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    counted = labels != IGNORE
    number = counted.sum().clamp(min=1)
    log_z = torch.logsumexp(logits, dim=-1)
    target = logits.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
    nll = (log_z - target).masked_fill(~counted, 0.0).sum() / number
    z = log_z.square().mean()
    return nll + Z * z


subject = Subject(
    kind="loss",
    forward=loss,
    declares={"ignore_index": -100, "z_loss": 1e-2, "shifts_labels": False, "empty_loss": "zero"},
)

WHAT = 'The z-loss is the mean over all positions, ignored ones (padding, prompt) included, while the cross-entropy is that over the labels that count (line 17).'
