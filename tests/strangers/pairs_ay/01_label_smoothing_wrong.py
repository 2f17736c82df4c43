WHAT = "Ignored positions still enter the smoothing term: masked_fill without the underscore throws its result away, so smooth_loss keeps padding, line 17."
"""Label smoothed cross entropy, fairseq manner."""

import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=None):
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
    nll_loss.masked_fill_(pad_mask, 0.0)
    smooth_loss.masked_fill(pad_mask, 0.0)
    sample_size = (~pad_mask).sum().clamp(min=1)
    return ((1.0 - epsilon) * nll_loss.sum() + epsilon * smooth_loss.sum()) / sample_size


class LabelSmoothedCrossEntropyCriterion(nn.Module):
    def __init__(self, label_smoothing=0.1, ignore_index=-100):
        super().__init__()
        self.eps = label_smoothing
        self.ignore_index = ignore_index

    def forward(self, net_output, target):
        lprobs = F.log_softmax(net_output, dim=-1)
        return label_smoothed_nll_loss(
            lprobs.reshape(-1, lprobs.size(-1)), target.reshape(-1), self.eps, ignore_index=self.ignore_index
        )


subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(0.1),
    forward=lambda criterion, logits, labels: criterion(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
