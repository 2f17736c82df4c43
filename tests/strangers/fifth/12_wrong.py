"""Label smoothed cross-entropy, fairseq style. The padding index is 1."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    nll_loss = -lprobs.gather(dim=-1, index=target)
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    pad_mask = target.eq(ignore_index)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    nll_loss = nll_loss.sum()
    smooth_loss = smooth_loss.sum()
    eps_i = epsilon / lprobs.size(-1)
    loss = (1.0 - epsilon) * nll_loss + eps_i * smooth_loss
    return loss


class LabelSmoothedCrossEntropyCriterion(nn.Module):
    def __init__(self, label_smoothing, padding_idx):
        super().__init__()
        self.eps = label_smoothing
        self.padding_idx = padding_idx

    def forward(self, logits, target):
        lprobs = F.log_softmax(logits, dim=-1)
        lprobs = lprobs.reshape(-1, lprobs.size(-1))
        target = target.reshape(-1)
        loss = label_smoothed_nll_loss(lprobs, target, self.eps, self.padding_idx)
        ntokens = target.ne(self.padding_idx).sum().clamp(min=1)
        return loss / ntokens


subject = Subject(
    kind="loss",
    name="label smoothed cross-entropy",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(0.1, 1),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={
        "label_smoothing": 0.1,
        "ignore_index": 1,
        "shifts_labels": False,
        "empty_loss": "zero",
        "z_loss": 0,
    },
)
