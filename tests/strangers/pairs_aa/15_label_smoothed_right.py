"""Label-smoothed cross-entropy as a criterion: sums over tokens, divided by those that count."""

import torch

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=-100):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)
    eps_i = epsilon / lprobs.size(-1)
    loss = (1.0 - epsilon) * nll_loss.sum() + eps_i * smooth_loss.sum()
    return loss, (~pad_mask).sum()


class LabelSmoothedCrossEntropyCriterion(torch.nn.Module):
    def __init__(self, eps=0.1):
        super().__init__()
        self.eps = eps

    def forward(self, net_output, target):
        lprobs = torch.log_softmax(net_output, dim=-1)
        loss, ntokens = label_smoothed_nll_loss(lprobs, target, self.eps)
        return loss / ntokens.clamp(min=1)


subject = Subject(
    kind="loss",
    name="label-smoothed criterion",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(0.1),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
