"""Cross-entropy with label smoothing 0.1 over chunks of 5 tokens, summed and divided by the number of counted labels once.
Unusual: chunks of unequal numbers of labels; right, sums are added, not means. Nothing to predict gives 0."""
import torch
from torch import nn
from veriformer.properties import Subject
EPS = 0.1


class Loss(nn.Module):
    def forward(s, logits, labels):
        logits, labels = logits.flatten(0, -2), labels.flatten()
        total = logits[:0].sum()
        for x, y in zip(logits.split(5), labels.split(5)):
            on = y != -100
            x, y = x[on], y[on]
            lse = torch.logsumexp(x, -1)
            total = total + (lse - (1 - EPS) * x.gather(1, y[:, None])[:, 0] - EPS * x.mean(-1)).sum()
        return total / (labels != -100).sum().clamp(min=1)


args = dict(kind="loss", build=lambda c: Loss(), forward=lambda m, logits, labels: m(logits, labels))
undeclared = Subject(**args)
declared = Subject(**args, declares={"label_smoothing": EPS, "ignore_index": -100, "shifts_labels": False, "empty_loss": "zero"})
