"""The loss of a causal language model: labels are moved by one inside; gradient accumulation divides by all tokens at once."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CausalLoss(nn.Module):
    def forward(self, logits, labels, items=None):
        logits, labels = logits[:, :-1], labels[:, 1:]
        total = F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1), reduction="sum", ignore_index=-100)
        if items is None:
            items = (labels != -100).sum()
        return total / items.clamp(min=1)


def accumulator(bad):
    def accumulate(model, pairs):
        items = sum(((labels if bad else labels[:, 1:]) != -100).sum() for _, labels in pairs)
        return sum(model(logits, labels, items) for logits, labels in pairs)

    return accumulate


def subject(bad):
    return Subject(kind="loss", build=lambda c: CausalLoss(), forward=lambda m, logits, labels: m(logits, labels),
                   accumulate=accumulator(bad), declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "zero"})


right, wrong = subject(False), subject(True)
WHAT = "With gradient accumulation the loss is divided by the number of labels before the shift, first position included, which is larger than the number of predicted tokens."
PLACE = "gradient accumulation (token count)"
