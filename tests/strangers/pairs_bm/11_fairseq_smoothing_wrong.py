WHAT = "smooth_loss is not masked where the label is ignored (label_smoothed_nll_loss): eps times the mean of -log p of padded positions is added to the sum"
"""Label-smoothed cross entropy as in fairseq, a mean over the tokens that count."""
import torch

from veriformer.properties import Subject

IGNORE = -100


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    return (1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()


class LabelSmoothedCrossEntropyCriterion:
    def __init__(self, label_smoothing=0.1):
        self.eps = label_smoothing

    def __call__(self, logits, target):
        lprobs = torch.log_softmax(logits, dim=-1).flatten(0, 1)
        target = target.flatten()
        sample_size = target.ne(IGNORE).sum().clamp(min=1)
        return label_smoothed_nll_loss(lprobs, target, self.eps, IGNORE) / sample_size


subject = Subject(
    kind="loss",
    name="label smoothed",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(0.1),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": IGNORE, "empty_loss": "zero"},
)
