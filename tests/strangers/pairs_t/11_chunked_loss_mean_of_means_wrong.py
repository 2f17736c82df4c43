WHAT = "the loss is the mean of the means of the chunks, which counts labels of chunks with much padding more (line 41)"

"""Cross-entropy in chunks, so that the float32 copy of all logits never exists at once."""

import torch
from torch import nn

from veriformer.properties import Subject


class ChunkedCrossEntropy(nn.Module):
    """The mean of -log p(label) over the labels that count.

    Logits of a long sequence and a large vocabulary in float32 are the largest tensor of training; here they are
    taken in chunks of rows.
    """

    def __init__(self, rows=4, ignore_index=-100):
        super().__init__()
        self.rows = rows
        self.ignore_index = ignore_index

    def chunk(self, logits, labels):
        """Sum of the losses of a chunk, and how many labels it has."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        counts = labels != self.ignore_index
        safe = labels.masked_fill(~counts, 0)
        chosen = wide.gather(-1, safe[:, None])[:, 0]
        losses = torch.logsumexp(wide, dim=-1) - chosen
        return losses.masked_fill(~counts, 0.0).sum(), counts.sum()

    def forward(self, logits, labels):
        logits = logits.reshape(-1, logits.shape[-1])
        labels = labels.reshape(-1)
        sums, counts = [], []
        for part, wanted in zip(logits.split(self.rows), labels.split(self.rows), strict=True):
            total, count = self.chunk(part, wanted)
            sums.append(total)
            counts.append(count)
        sums, counts = torch.stack(sums), torch.stack(counts)
        return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="chunked cross-entropy",
    build=lambda c: ChunkedCrossEntropy(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
