WHAT = 'The uniform part of the label-smoothed loss is summed over ignored positions too, while only the likelihood is masked: what the model says at padding enters loss and gradient (line 20).'
import torch
from torch import nn

from veriformer.properties import Subject


class LabelSmoothedCrossEntropy(nn.Module):
    """fairseq-like criterion: (1 - eps) * nll + eps * uniform, mean over the labels that count."""

    def __init__(self, eps=0.1, ignore_index=-100):
        super().__init__()
        self.eps, self.ignore_index = eps, ignore_index

    def forward(self, logits, target):
        logp = torch.log_softmax(logits, dim=-1)
        pad = target.eq(self.ignore_index)
        index = target.masked_fill(pad, 0).unsqueeze(-1)
        nll = -logp.gather(-1, index).squeeze(-1).masked_fill(pad, 0.0).sum()
        smooth = -logp.mean(-1).sum()
        count = (~pad).sum().clamp(min=1)
        return ((1.0 - self.eps) * nll + self.eps * smooth) / count


subject = Subject(
    kind="loss",
    name="label-smoothed loss",
    build=lambda c: LabelSmoothedCrossEntropy(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "shifts_labels": False, "empty_loss": "zero"},
)
