WHAT = 'The log of the partition function is detached in the z-loss (line 24: `log_z.detach()`, taken over from the line that logs it), so that the value of the loss is right and the z-loss never trains anything.'
"""Cross-entropy with PaLM's z-loss."""
import torch
from torch import nn

from veriformer.properties import Subject


class CrossEntropyWithZLoss(nn.Module):
    def __init__(self, z_loss=0.01, ignore_index=-100):
        super().__init__()
        self.z_loss, self.ignore_index = z_loss, ignore_index
        self.metrics = {}

    def forward(self, logits, targets):
        logits = logits.reshape(-1, logits.shape[-1])
        targets = targets.reshape(-1)
        weights = (targets != self.ignore_index).to(logits.dtype)
        denominator = weights.sum()

        log_z = torch.logsumexp(logits, dim=-1)
        picked = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        nll = ((log_z - picked) * weights).sum() / denominator
        z_term = self.z_loss * (log_z.detach().square() * weights).sum() / denominator

        self.metrics = {"nll": nll.detach(), "z_loss": z_term.detach()}
        return nll + z_term


subject = Subject(
    kind="loss",
    name="z-loss",
    build=lambda c: CrossEntropyWithZLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"z_loss": 0.01, "ignore_index": -100, "empty_loss": "nan", "shifts_labels": False},
)
