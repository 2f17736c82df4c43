WHAT = 'accumulate weighs the mean loss of a micro-batch by labels.numel(), padding and all, in place of the number of labels that count, so micro-batches with much padding weigh too much (line 21).'
from veriformer.properties import Subject

import torch
from torch import nn
import torch.nn.functional as F


class LMLoss(nn.Module):
    ignore_index = -100

    def forward(self, logits, labels):
        total = F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        return total / (labels != self.ignore_index).sum().clamp(min=1)


def weight_of(criterion, labels):
    """How much a micro-batch counts in the loss of the whole batch."""
    return labels.numel()


def accumulate(criterion, micro_batches):
    weights = [weight_of(criterion, labels) for _, labels in micro_batches]
    whole = max(sum(weights), 1)
    loss = 0.0
    for weight, (logits, labels) in zip(weights, micro_batches):
        loss = loss + criterion(logits, labels) * (weight / whole)
    return loss


subject = Subject(
    kind="loss",
    name="loss with gradient accumulation",
    build=lambda c: LMLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    accumulate=accumulate,
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
