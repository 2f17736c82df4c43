WHAT = "Labels are shifted inside each chunk instead of before the split, so that the prediction across every boundary between chunks is not counted (line 30)."
"""Cross entropy by chunks of the sequence: the log softmax of all logits is never held at once."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class ChunkedLoss(nn.Module):
    """Position t predicts token t + 1; labels of -100 are not counted; the mean is over what is counted."""

    def __init__(self, chunk=4, ignore_index=-100):
        super().__init__()
        self.chunk, self.ignore_index = chunk, ignore_index

    def piece(self, logits, labels):
        """The sum of the losses of one chunk, and how many there are."""
        flat = logits.flatten(0, 1)
        goal = labels.flatten()
        loss = F.cross_entropy(flat, goal, ignore_index=self.ignore_index, reduction="sum")
        return loss, (goal != self.ignore_index).sum()

    def forward(self, logits, labels):
        if labels.shape[1] < 2:
            return logits.sum() * 0.0
        total, count = logits.new_zeros(()), 0
        for some, goal in zip(logits.split(self.chunk, dim=1), labels.split(self.chunk, dim=1), strict=True):
            loss, number = self.piece(some[:, :-1], goal[:, 1:])
            total, count = total + loss, count + number
        return total / count.clamp(min=1)


subject = Subject(
    kind="loss",
    name="chunked cross entropy",
    build=lambda c: ChunkedLoss(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"shifts_labels": True, "empty_loss": "zero", "ignore_index": -100},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randn(2, 7, 11), torch.randint(11, (2, 7))))
