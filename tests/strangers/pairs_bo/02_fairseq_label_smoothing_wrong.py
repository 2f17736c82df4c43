WHAT = "only nll_loss is masked at ignored labels, the uniform part smooth_loss is summed over ignored positions too (the masked_fill of smooth_loss is missing after line 14)."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    nll_loss = nll_loss.sum()
    smooth_loss = smooth_loss.sum()
    eps_i = epsilon / lprobs.size(-1)
    return (1.0 - epsilon) * nll_loss + eps_i * smooth_loss


class LabelSmoothedCrossEntropyCriterion(nn.Module):
    def __init__(self, label_smoothing=0.1, ignore_index=-100):
        super().__init__()
        self.eps = label_smoothing
        self.ignore_index = ignore_index

    def forward(self, logits, target):
        lprobs = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        lprobs = lprobs.reshape(-1, lprobs.size(-1))
        target = target.reshape(-1)
        ntokens = target.ne(self.ignore_index).sum().clamp(min=1)
        return label_smoothed_nll_loss(lprobs, target, self.eps, self.ignore_index) / ntokens


subject = Subject(
    kind="loss",
    name="label-smoothed criterion",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(0.1),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
