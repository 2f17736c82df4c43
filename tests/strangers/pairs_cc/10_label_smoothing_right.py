import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class LabelSmoothedCrossEntropy(nn.Module):
    def __init__(self, epsilon=0.1, ignore_index=-100):
        super().__init__()
        self.epsilon, self.ignore_index = epsilon, ignore_index

    def forward(self, logits, target):
        lprobs = F.log_softmax(logits, dim=-1).reshape(-1, logits.size(-1))
        target = target.reshape(-1, 1)
        pad_mask = target.eq(self.ignore_index)
        nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
        smooth_loss = -lprobs.mean(dim=-1, keepdim=True)
        nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
        smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)
        loss = (1.0 - self.epsilon) * nll_loss.sum() + self.epsilon * smooth_loss.sum()
        return loss / (~pad_mask).sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    build=lambda c: LabelSmoothedCrossEntropy(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
