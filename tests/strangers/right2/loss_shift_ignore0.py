"""A language model's loss that shifts the labels itself and ignores label 0 (padding), through one-hot targets and einsum.
Unusual: label 0 is a class of the vocabulary that is never counted; right, it is padding. Nothing to predict gives 0."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class ShiftedLoss(nn.Module):
    def forward(s, logits, labels):
        logp, target = logits[:, :-1].log_softmax(-1), labels[:, 1:]
        weight = (target != 0).to(logp.dtype)
        hot = F.one_hot(target, logits.shape[-1]).to(logp.dtype)
        nll = -torch.einsum("btv,btv->bt", logp, hot)
        return (nll * weight).sum() / weight.sum().clamp(min=1)


args = dict(kind="loss", build=lambda c: ShiftedLoss(), forward=lambda m, logits, labels: m(logits, labels))
undeclared = Subject(**args)
declared = Subject(**args, declares={"ignore_index": 0, "shifts_labels": True, "empty_loss": "zero", "label_smoothing": 0.0})
