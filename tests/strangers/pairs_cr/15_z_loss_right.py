"""Cross-entropy with PaLM's z-loss: c times the mean of log(Z) squared over the tokens that count."""
import torch
from torch import nn
from veriformer.properties import Subject

Z = 1e-2
IGNORE = -100


class ZLoss(nn.Module):
    def forward(self, logits, labels):
        counted = labels != IGNORE
        n = counted.sum().clamp(min=1)
        log_z = logits.logsumexp(-1)
        picked = logits.gather(-1, labels.masked_fill(~counted, 0)[..., None]).squeeze(-1)
        nll = (log_z - picked).masked_fill(~counted, 0.0).sum() / n
        z = log_z.square().masked_fill(~counted, 0.0).sum() / n
        return nll + Z * z


subject = Subject(
    kind="loss",
    build=lambda c: ZLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"z_loss": Z, "ignore_index": IGNORE, "empty_loss": "zero"},
)
