WHAT = "The backward gives the gradient that the forward stored and forgets grad_output (line 37): a loss that is weighted, scaled for half precision or divided for accumulation still trains with the factor 1."
"""Cross entropy with label smoothing that computes its gradient in the forward, chunk by chunk (after Liger)."""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

IGNORE_INDEX = -100
SMOOTHING = 0.1
CHUNK = 8


class FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, eps):
        rows, vocab = logits.shape
        count = (labels != IGNORE_INDEX).sum().clamp(min=1)
        grad = torch.empty_like(logits)
        loss = logits.new_zeros(())
        for start in range(0, rows, CHUNK):
            part, label = logits[start : start + CHUNK], labels[start : start + CHUNK]
            real = (label != IGNORE_INDEX).unsqueeze(-1)
            target = torch.full_like(part, eps / vocab)
            index = label.masked_fill(label == IGNORE_INDEX, 0).unsqueeze(-1)
            target.scatter_add_(-1, index, torch.full_like(index, 1, dtype=part.dtype) * (1.0 - eps))
            log_p = part.log_softmax(-1)
            loss = loss - (target * log_p * real).sum() / count
            grad[start : start + CHUNK] = (log_p.exp() - target) * real / count
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grad,) = ctx.saved_tensors
        return grad, None, None


def cross_entropy(logits, labels):
    """logits [B, T, V], labels [B, T] -> the mean over the labels that count"""
    return FusedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), SMOOTHING)


subject = Subject(
    kind="loss",
    name="fused cross entropy",
    build=lambda c: cross_entropy,
    forward=lambda model, logits, labels: model(logits, labels),
    declares={
        "ignore_index": IGNORE_INDEX,
        "label_smoothing": SMOOTHING,
        "shifts_labels": False,
        "empty_loss": "zero",
        "once_differentiable": True,
    },
)
