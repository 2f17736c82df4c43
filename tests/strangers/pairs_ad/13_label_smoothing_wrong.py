WHAT = "padding is taken out of the likelihood but not of the smoothing term (after line 17 smooth_loss is never masked), so that ignored positions count and get gradient"
"""Label-smoothed cross entropy, in fairseq's manner; padding is label 0."""

import torch

from veriformer.properties import Subject

PAD = 0


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=None):
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target)
    smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    loss = (1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()
    return loss, nll_loss.sum()


class LabelSmoothedCrossEntropyCriterion:
    def __init__(self, eps=0.1, padding_idx=PAD):
        self.eps = eps
        self.padding_idx = padding_idx

    def __call__(self, logits, target):
        lprobs = torch.log_softmax(logits, dim=-1).view(-1, logits.size(-1))
        target = target.reshape(-1)
        loss, _ = label_smoothed_nll_loss(lprobs, target, self.eps, ignore_index=self.padding_idx)
        ntokens = target.ne(self.padding_idx).sum().clamp(min=1)
        return loss / ntokens


criterion = LabelSmoothedCrossEntropyCriterion()
subject = Subject(
    kind="loss",
    name="LabelSmoothedCrossEntropyCriterion",
    forward=lambda model, logits, labels: criterion(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": PAD, "empty_loss": "zero"},
)
