WHAT = 'fairseq-style smoothed loss: the smoothing term is summed over the ignored tokens, too (`smooth = smooth.sum()` without the mask), though it is divided by the counted ones'
import torch
from torch import nn

from veriformer.properties import Subject


class LabelSmoothedCrossEntropy(nn.Module):
    def __init__(self, eps=0.1, ignore_index=-100):
        super().__init__()
        self.eps = eps
        self.ignore_index = ignore_index

    def forward(self, logits, labels):
        lprobs = logits.log_softmax(dim=-1).flatten(0, 1)
        target = labels.reshape(-1, 1)
        pad = target.eq(self.ignore_index)
        nll = -lprobs.gather(-1, target.masked_fill(pad, 0))
        smooth = -lprobs.mean(dim=-1, keepdim=True)
        nll = nll.masked_fill(pad, 0.0).sum()
        smooth = smooth.sum()
        count = (~pad).sum().clamp(min=1)
        return ((1.0 - self.eps) * nll + self.eps * smooth) / count


subject = Subject(
    kind="loss",
    name="smoothed loss of a code model",
    build=lambda c: LabelSmoothedCrossEntropy(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero"},
)
