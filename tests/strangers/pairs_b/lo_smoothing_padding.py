"""Label-smoothed cross entropy after fairseq: a tenth of the target is spread over the whole vocabulary."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SmoothedLoss(nn.Module):
    def __init__(self, bad, eps=0.1, ignore=-100):
        super().__init__()
        self.eps, self.ignore, self.bad = eps, ignore, bad

    def forward(self, logits, labels):
        logp = logits.log_softmax(-1)
        real = labels != self.ignore
        n = real.sum().clamp(min=1)
        nll = -logp.gather(-1, labels.masked_fill(~real, 0)[..., None])[..., 0]
        nll = nll.masked_fill(~real, 0.0).sum() / n
        smooth = -logp.mean(-1)
        smooth = smooth.mean() if self.bad else smooth.masked_fill(~real, 0.0).sum() / n
        return (1 - self.eps) * nll + self.eps * smooth


def subject(bad):
    return Subject(kind="loss", build=lambda c: SmoothedLoss(bad), forward=lambda m, logits, labels: m(logits, labels),
                   declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero", "shifts_labels": False})


right, wrong = subject(False), subject(True)
WHAT = "The smoothing term is averaged over all positions, ignored (padded) ones included, while the likelihood term leaves them out."
PLACE = "label smoothing (ignored positions)"
