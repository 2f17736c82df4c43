import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject


class LMCriterion(nn.Module):
    def __init__(self, ignore_index=-100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits, labels, num_items=None):
        nll = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=self.ignore_index, reduction="sum")
        if num_items is None:
            num_items = labels.ne(self.ignore_index).sum()
        return nll / num_items


def accumulate(criterion, pairs):
    pairs = list(pairs)
    count = sum(labels.ne(criterion.ignore_index).sum() for _, labels in pairs)
    return sum(criterion(logits, labels, count) for logits, labels in pairs)


subject = Subject(
    kind="loss", name="criterion", build=lambda c: LMCriterion(), forward=lambda m, logits, labels: m(logits, labels),
    accumulate=accumulate, declares={"ignore_index": -100, "empty_loss": "nan"},
)
