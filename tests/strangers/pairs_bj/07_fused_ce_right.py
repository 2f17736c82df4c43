"""Cross-entropy with z-loss that makes the gradient while it goes forward (as fused kernels do)."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

IGNORE = -100
Z = 0.02


class FusedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels):
        V = logits.size(-1)
        x = logits.reshape(-1, V)
        y = labels.reshape(-1)
        keep = y != IGNORE
        count = keep.sum().clamp(min=1)
        index = y.masked_fill(~keep, 0)[:, None]

        lse = torch.logsumexp(x, dim=-1, keepdim=True)
        rows = lse - x.gather(1, index) + Z * lse.square()
        loss = rows.squeeze(1).masked_fill(~keep, 0).sum() / count

        # d(lse) / dx is the softmax; once for the cross-entropy, once for the z term
        grad = torch.exp(x - lse)
        grad.mul_(1 + 2 * Z * lse)
        grad.scatter_add_(1, index, torch.full_like(lse, -1.0))
        grad.masked_fill_(~keep[:, None], 0).div_(count)
        ctx.save_for_backward(grad.view_as(logits))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        return grad * upstream, None


subject = Subject(
    kind="loss",
    name="fused cross-entropy",
    forward=lambda model, logits, labels: FusedCrossEntropy.apply(logits, labels),
    declares={"ignore_index": IGNORE, "z_loss": Z, "empty_loss": "zero", "once_differentiable": True},
)
