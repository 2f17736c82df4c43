WHAT = "the backward gives the gradient made in the forward without the factor grad_output (line 34): a loss that is weighted, or divided for accumulation, trains as if it were not"
"""Fused cross entropy: the gradient is made in the forward, in the place of the softmax, and kept for the backward."""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index):
        flat, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        keep = labels.ne(ignore_index)
        n = keep.sum().clamp_(min=1)
        safe = labels.masked_fill(~keep, 0).unsqueeze(1)

        shifted = flat - flat.amax(dim=1, keepdim=True)
        picked = shifted.gather(1, safe).squeeze(1)
        buffer = shifted.exp_()
        denominator = buffer.sum(dim=1, keepdim=True)
        loss = (denominator.squeeze(1).log() - picked).masked_fill_(~keep, 0.0).sum() / n

        buffer.div_(denominator)
        buffer.scatter_add_(1, safe, torch.full_like(safe, -1, dtype=buffer.dtype))
        buffer.mul_(keep.unsqueeze(1)).div_(n)
        ctx.save_for_backward(buffer.view_as(logits))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grad_logits,) = ctx.saved_tensors
        return grad_logits, None, None


class CrossEntropy(torch.nn.Module):
    def __init__(self, ignore_index=-100):
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits, labels):
        return FusedCrossEntropy.apply(logits, labels, self.ignore_index)


subject = Subject(
    kind="loss",
    name="FusedCrossEntropy",
    build=lambda c: CrossEntropy(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True},
)
