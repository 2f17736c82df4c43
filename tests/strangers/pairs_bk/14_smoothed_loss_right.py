import torch
from torch import nn

from veriformer.properties import Subject


class LabelSmoothedCrossEntropy(nn.Module):
    def __init__(self, eps=0.1, ignore_index=-100):
        super().__init__()
        self.eps = eps
        self.ignore_index = ignore_index

    def forward(self, logits, target):
        lprobs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        pad_mask = target.eq(self.ignore_index)
        nll_loss = -lprobs.gather(-1, target.masked_fill(pad_mask, 0).unsqueeze(-1)).squeeze(-1)
        smooth_loss = -lprobs.mean(-1)
        nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
        smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)
        ntokens = (~pad_mask).sum().clamp(min=1)
        nll_loss = nll_loss.sum() / ntokens
        smooth_loss = smooth_loss.sum() / ntokens
        return (1.0 - self.eps) * nll_loss + self.eps * smooth_loss


subject = Subject(
    kind="loss",
    build=lambda c: LabelSmoothedCrossEntropy(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "zero", "shifts_labels": False},
)
