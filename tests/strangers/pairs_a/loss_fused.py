import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The fused cross-entropy computes the gradient of the logits in its forward, and its backward returns '
    'it without multiplying by the incoming gradient, so a loss that is scaled, weighted or divided gives '
    'unscaled gradients.'
)
PLACE = 'backward of the fused cross-entropy autograd.Function'


class FusedLoss(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows."""

    chunk = 4

    @staticmethod
    def forward(ctx, logits, labels):
        counted = labels != -100
        count = counted.sum().clamp(min=1)
        grad, loss = torch.zeros_like(logits), logits.new_zeros(())
        for rows in torch.arange(logits.size(0), device=logits.device).split(FusedLoss.chunk):
            keep = counted[rows][:, None]
            target = labels[rows].clamp(min=0)[:, None]
            logp = logits[rows].log_softmax(-1)
            loss = loss - (logp.gather(1, target) * keep).sum()
            grad[rows] = logp.exp().scatter_add(1, target, logp.new_full(target.shape, -1.0)) * keep / count
        ctx.save_for_backward(grad)
        return loss / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, incoming):
        (grad,) = ctx.saved_tensors
        return grad * incoming, None


class FusedCrossEntropy(nn.Module):
    def forward(self, logits, labels):
        return FusedLoss.apply(logits.flatten(0, -2), labels.flatten())


class FusedLoss2(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows."""

    chunk = 4

    @staticmethod
    def forward(ctx, logits, labels):
        counted = labels != -100
        count = counted.sum().clamp(min=1)
        grad, loss = torch.zeros_like(logits), logits.new_zeros(())
        for rows in torch.arange(logits.size(0), device=logits.device).split(FusedLoss2.chunk):
            keep = counted[rows][:, None]
            target = labels[rows].clamp(min=0)[:, None]
            logp = logits[rows].log_softmax(-1)
            loss = loss - (logp.gather(1, target) * keep).sum()
            grad[rows] = logp.exp().scatter_add(1, target, logp.new_full(target.shape, -1.0)) * keep / count
        ctx.save_for_backward(grad)
        return loss / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, incoming):
        (grad,) = ctx.saved_tensors
        return grad, None


class FusedCrossEntropy2(nn.Module):
    def forward(self, logits, labels):
        return FusedLoss2.apply(logits.flatten(0, -2), labels.flatten())


right = Subject(
    kind="loss",
    build=lambda c: FusedCrossEntropy(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True},
)

wrong = Subject(
    kind="loss",
    build=lambda c: FusedCrossEntropy2(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero", "once_differentiable": True},
)
