import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "Under gradient accumulation the loss is the mean of the micro-batches' means instead of the sum of "
    'losses over the sum of counted tokens, so micro-batches with few counted tokens weigh too much.'
)
PLACE = 'normalisation of the loss over accumulated micro-batches'


class TokenLoss(nn.Module):
    """Mean cross-entropy over the counted tokens, also when a batch comes in parts."""

    def total(self, logits, labels):
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, (labels != -100).sum()

    def forward(self, logits, labels):
        loss, count = self.total(logits, labels)
        return loss / count.clamp(min=1)

    def accumulate(self, pairs):
        losses, counts = zip(*(self.total(logits, labels) for logits, labels in pairs))
        return sum(losses) / sum(counts).clamp(min=1)


class TokenLoss2(nn.Module):
    """Mean cross-entropy over the counted tokens, also when a batch comes in parts."""

    def total(self, logits, labels):
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, (labels != -100).sum()

    def forward(self, logits, labels):
        loss, count = self.total(logits, labels)
        return loss / count.clamp(min=1)

    def accumulate(self, pairs):
        losses = [self(logits, labels) for logits, labels in pairs]
        return sum(losses) / len(losses)


right = Subject(
    kind="loss",
    build=lambda c: TokenLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    accumulate=lambda m, pairs: m.accumulate(pairs),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)

wrong = Subject(
    kind="loss",
    build=lambda c: TokenLoss2(),
    forward=lambda m, logits, labels: m(logits, labels),
    accumulate=lambda m, pairs: m.accumulate(pairs),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
