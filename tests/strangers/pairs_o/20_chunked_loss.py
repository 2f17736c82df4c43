"""Cross-entropy in chunks of rows, so that no float32 copy of all logits is ever held."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The losses of the chunks are averaged as if every chunk held as many labels that count."
CAUSE = (
    "Each chunk's loss is its own mean, and the mean of these is returned: with ignored labels, or a last chunk that is "
    "shorter, tokens in chunks with few counted labels weigh more than others (mean of means)."
)


class ChunkedCrossEntropy(nn.Module):
    """Mean of -log p(label) over the labels that are not `ignore_index`; 0 where there is none."""

    def __init__(self, rows: int = 4, ignore_index: int = -100):
        super().__init__()
        self.rows, self.ignore_index = rows, ignore_index

    def chunks(self, logits, labels):
        logits, labels = logits.flatten(0, 1), labels.flatten()
        wide = torch.promote_types(logits.dtype, torch.float32)
        for some, theirs in zip(logits.split(self.rows), labels.split(self.rows)):
            yield some.to(wide), theirs

    def forward(self, logits, labels):
        count = (labels != self.ignore_index).sum().clamp(min=1)
        total = 0.0
        for some, theirs in self.chunks(logits, labels):
            total = total + F.cross_entropy(some, theirs, ignore_index=self.ignore_index, reduction="sum")
        return total / count


class ChunkedCrossEntropyOfMeans(ChunkedCrossEntropy):
    def forward(self, logits, labels):
        total, used = 0.0, 0
        for some, theirs in self.chunks(logits, labels):
            count = (theirs != self.ignore_index).sum()
            loss = F.cross_entropy(some, theirs, ignore_index=self.ignore_index, reduction="sum") / count.clamp(min=1)
            total, used = total + loss, used + (count > 0).long()
        return total / used.clamp(min=1)


def loss(cls):
    return Subject(
        kind="loss",
        name="chunked cross-entropy",
        build=lambda c: cls(),
        forward=lambda m, logits, labels: m(logits, labels),
        declares={"ignore_index": -100, "empty_loss": "zero"},
    )


right = loss(ChunkedCrossEntropy)
wrong = loss(ChunkedCrossEntropyOfMeans)
