"""Label-smoothed cross entropy, after fairseq's criterion, as a mean over the tokens that count."""

import torch

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0).unsqueeze(-1)).squeeze(-1)
    smooth_loss = -lprobs.mean(dim=-1)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)
    loss = (1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()
    return loss / pad_mask.logical_not().sum().clamp(min=1)


class LabelSmoothedCrossEntropyCriterion(torch.nn.Module):
    def __init__(self, eps=0.1, ignore_index=-100):
        super().__init__()
        self.eps = eps
        self.ignore_index = ignore_index

    def forward(self, logits, labels):
        lprobs = torch.log_softmax(logits, dim=-1).reshape(-1, logits.size(-1))
        return label_smoothed_nll_loss(lprobs, labels.reshape(-1), self.eps, self.ignore_index)


subject = Subject(
    kind="loss",
    name="label-smoothed cross entropy",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero", "shifts_labels": False},
)
