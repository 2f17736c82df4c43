WHAT = 'labels are shifted inside each chunk of the sequence (line 22), so that the prediction across every chunk border (position 3 for label 4, ...) is never counted'
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ChunkedCausalLoss(nn.Module):
    """Next-token loss over slices of the sequence, so that log-probabilities of all of it are never held at once."""

    def __init__(self, chunk=4, ignore_index=-100):
        super().__init__()
        self.chunk, self.ignore_index = chunk, ignore_index

    def forward(self, logits, labels):
        total = logits.sum() * 0.0
        count = torch.zeros((), dtype=torch.long, device=labels.device)
        for start in range(0, labels.shape[1], self.chunk):
            part = logits[:, start : start + self.chunk][:, :-1].flatten(0, 1)
            wanted = labels[:, start : start + self.chunk][:, 1:].flatten()
            total = total + F.cross_entropy(part, wanted, ignore_index=self.ignore_index, reduction="sum")
            count = count + wanted.ne(self.ignore_index).sum()
        return total / count.clamp(min=1)


subject = Subject(
    kind="loss",
    name="chunked causal loss",
    build=lambda c: ChunkedCausalLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "zero"},
)
