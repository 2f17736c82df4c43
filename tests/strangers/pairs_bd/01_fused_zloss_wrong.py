WHAT = "the hand-written backward takes the derivative of z * lse^2 as z * lse * softmax: the factor 2 of the square is lost, so the z-loss trains half as strongly as the loss says (the value of the loss is right) (line 33)"
"""Cross-entropy with z-loss in one autograd function: the logits' gradient is made in the backward, nothing else is kept."""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

Z_LOSS = 1e-3
IGNORE = -100


class FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignore_index, z_loss):
        work = logits if logits.dtype == torch.float64 else logits.float()
        lse = torch.logsumexp(work, dim=-1)
        counted = labels != ignore_index
        index = labels.masked_fill(~counted, 0)
        nll = lse - work.gather(-1, index[:, None]).squeeze(-1)
        total = counted.sum().clamp(min=1)
        per_token = nll + z_loss * lse.square()
        loss = torch.where(counted, per_token, torch.zeros_like(per_token)).sum() / total
        ctx.save_for_backward(logits, index, counted, lse, total)
        ctx.z_loss = z_loss
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        logits, index, counted, lse, total = ctx.saved_tensors
        grad = torch.exp(logits.to(lse.dtype) - lse[:, None])
        grad.mul_(1.0 + ctx.z_loss * lse[:, None])
        grad.scatter_add_(-1, index[:, None], -torch.ones_like(lse)[:, None])
        grad.masked_fill_(~counted[:, None], 0.0)
        grad.mul_(grad_output.to(lse.dtype) / total)
        return grad.to(logits.dtype), None, None, None


def lm_loss(logits, labels):
    return FusedCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), IGNORE, Z_LOSS)


subject = Subject(
    kind="loss",
    name="fused cross-entropy with z-loss",
    forward=lambda model, logits, labels: lm_loss(logits, labels),
    declares={
        "ignore_index": IGNORE,
        "z_loss": Z_LOSS,
        "shifts_labels": False,
        "empty_loss": "zero",
        "once_differentiable": True,
    },
)
