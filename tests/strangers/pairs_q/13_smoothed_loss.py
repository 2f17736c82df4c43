"""The loss of a trainer: label smoothing, ignored labels, computed in slices so that large vocabularies fit."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The smoothing term is summed over ignored positions too; only the term of the label leaves them out."
CAUSE = (
    "nll is zeroed where the label is -100, the uniform term (-mean of log p) is not: ignored positions add eps times their term and "
    "get a gradient, while the sum is still divided by the number of counted ones. Without smoothing or without ignored labels it is right."
)


class LabelSmoother(nn.Module):
    """Mean over counted positions of (1 - eps) * -log p(label) + eps * mean over the vocabulary of -log p."""

    def __init__(self, epsilon: float = 0.1, ignore_index: int = -100, slice_rows: int = 7) -> None:
        super().__init__()
        self.epsilon, self.ignore_index, self.slice_rows = epsilon, ignore_index, slice_rows

    def terms(self, logits, labels):
        """Sums of both terms over one slice of rows `[N, V]`, `[N]`."""
        ignored = labels == self.ignore_index
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        nll = -log_probs.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        smoothed = -log_probs.mean(-1)
        return self.drop_ignored(nll, smoothed, ignored)

    def drop_ignored(self, nll, smoothed, ignored):
        return nll.masked_fill(ignored, 0.0).sum(), smoothed.masked_fill(ignored, 0.0).sum()

    def forward(self, logits, labels):
        logits, labels = logits.flatten(0, -2), labels.flatten()
        parts = [self.terms(a, b) for a, b in zip(logits.split(self.slice_rows), labels.split(self.slice_rows))]
        nll, smoothed = (sum(column) for column in zip(*parts))
        counted = (labels != self.ignore_index).sum().clamp(min=1)
        return ((1 - self.epsilon) * nll + self.epsilon * smoothed) / counted


class SlicedLabelSmoother(LabelSmoother):
    def drop_ignored(self, nll, smoothed, ignored):
        return nll.masked_fill(ignored, 0.0).sum(), smoothed.sum()


FACTS = {"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"}
right = Subject(
    kind="loss", name="smoother", build=lambda c: LabelSmoother(), forward=lambda m, x, y: m(x, y), declares=FACTS
)
wrong = Subject(
    kind="loss", name="smoother", build=lambda c: SlicedLabelSmoother(), forward=lambda m, x, y: m(x, y), declares=FACTS
)
