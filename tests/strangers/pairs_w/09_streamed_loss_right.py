"""Cross entropy with a z-loss for large vocabularies: one pass over slabs of the vocabulary, and a backward by hand.

The forward keeps nothing of the size of the logits but the logits themselves.
"""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

IGNORED, SLAB = -100, 4


class StreamedLoss(Function):
    @staticmethod
    def forward(ctx, logits, labels, weight):
        """Mean over the labels that count of lse - logit of the label + weight * lse^2; logits [N, V], labels [N]."""
        counted = labels != IGNORED
        best = torch.full_like(logits[:, 0], -torch.inf)
        total = torch.zeros_like(best)
        for begin in range(0, logits.shape[1], SLAB):
            slab = logits[:, begin : begin + SLAB]
            higher = torch.maximum(best, slab.amax(dim=1))
            total = total * torch.exp(best - higher) + torch.exp(slab - higher[:, None]).sum(dim=1)
            best = higher
        lse = best + total.log()
        chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        each = lse - chosen + weight * lse.square()
        number = counted.sum().clamp(min=1)
        ctx.save_for_backward(logits, labels, lse, number)
        ctx.weight = weight
        return torch.where(counted, each, 0.0).sum() / number

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        logits, labels, lse, number = ctx.saved_tensors
        counted = labels != IGNORED
        factor = torch.where(counted, gradient / number, 0.0)
        slope = 1 + 2 * ctx.weight * lse
        result = torch.empty_like(logits)
        for begin in range(0, logits.shape[1], SLAB):
            piece = slice(begin, begin + SLAB)
            probability = torch.exp(logits[:, piece] - lse[:, None])
            result[:, piece] = probability * (slope * factor)[:, None]
        rows = torch.arange(len(labels), device=labels.device)[counted]
        result[rows, labels[counted]] -= factor[counted]
        return result, None, None


class Criterion(nn.Module):
    def __init__(self, weight=0.01):
        super().__init__()
        self.weight = weight

    def forward(self, logits, labels):
        return StreamedLoss.apply(logits.flatten(0, -2), labels.flatten(), self.weight)


subject = Subject(
    kind="loss",
    name="streamed cross entropy with z-loss",
    build=lambda c: Criterion(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"z_loss": 0.01, "ignore_index": IGNORED, "empty_loss": "zero", "once_differentiable": True, "half_precision": False},
)
