"""Label-smoothed cross-entropy, after fairseq's criterion, with the target distribution of Szegedy et al."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Of the two terms of the smoothed loss only the negative log likelihood leaves out ignored positions; the smoothing term sums over all of them."
CAUSE = (
    "The uniform part (the mean of -log p over the vocabulary) is not masked where the label is ignore_index, so padding "
    "adds to the loss and has a gradient, while the divisor counts real labels alone."
)


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    """Return the smoothed loss summed, and the number of targets."""
    pad = target.eq(ignore_index)
    nll = -lprobs.gather(-1, target.masked_fill(pad, 0)[..., None]).squeeze(-1)
    smooth = -lprobs.mean(-1)
    nll = nll.masked_fill(pad, 0.0)
    smooth = smooth.masked_fill(pad, 0.0)
    return (1.0 - epsilon) * nll.sum() + epsilon * smooth.sum(), (~pad).sum()


def label_smoothed_nll_loss_v2(lprobs, target, epsilon, ignore_index):
    """Return the smoothed loss summed, and the number of targets."""
    pad = target.eq(ignore_index)
    nll = -lprobs.gather(-1, target.masked_fill(pad, 0)[..., None]).squeeze(-1)
    smooth = -lprobs.mean(-1)
    nll = nll.masked_fill(pad, 0.0)
    return (1.0 - epsilon) * nll.sum() + epsilon * smooth.sum(), (~pad).sum()


class Criterion(nn.Module):
    def __init__(self, reduce, epsilon=0.1, ignore_index=-100):
        super().__init__()
        self.reduce, self.epsilon, self.ignore_index = reduce, epsilon, ignore_index

    def forward(self, logits, labels):
        lprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        loss, count = self.reduce(lprobs, labels, self.epsilon, self.ignore_index)
        return loss / count.clamp(min=1)


def subject(reduce, name):
    return Subject(
        kind="loss",
        name=name,
        build=lambda c: Criterion(reduce),
        forward=lambda m, logits, labels: m(logits, labels),
        declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
    )


right = subject(label_smoothed_nll_loss, "label_smoothed_cross_entropy")
wrong = subject(label_smoothed_nll_loss_v2, "label_smoothed_cross_entropy_v2")
