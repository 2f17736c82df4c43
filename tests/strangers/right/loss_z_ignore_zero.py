"""PaLM's loss: cross-entropy plus 1e-4 times the square of the log-partition, the label 0 (padding) is ignored.

Unusual: the added z term draws log Z towards 0, so the loss is not the bare cross-entropy and adding a constant to all logits
changes it a little, by design. Written over one-hot targets as T5X does. Nothing to predict gives 0.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

Z_LOSS = 1e-4


def cross_entropy_with_logits(logits, targets):
    """Per-token loss of one-hot targets, and the z term."""
    log_z = torch.logsumexp(logits, dim=-1)
    log_softmax = logits - log_z.unsqueeze(-1)
    loss = -torch.sum(targets * log_softmax, dim=-1)
    return loss, Z_LOSS * torch.square(log_z)


class ZLoss(nn.Module):
    def forward(self, logits, labels):
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        weights = (labels > 0).to(logits.dtype)
        onehot = F.one_hot(labels.clamp(min=0), logits.size(-1)).to(logits.dtype)
        loss, z = cross_entropy_with_logits(logits, onehot)
        return torch.sum((loss + z) * weights) / weights.sum().clamp(min=1.0)


COMMON = dict(kind="loss", build=lambda c: ZLoss(), forward=lambda m, logits, labels: m(logits, labels))
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"ignore_index": 0, "shifts_labels": False, "empty_loss": "zero"})
