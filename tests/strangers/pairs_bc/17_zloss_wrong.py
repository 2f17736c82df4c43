WHAT = "the hand-written backward lacks the factor 2 of the derivative of Z * lse^2 (line 29)."
"""Cross-entropy with a z-loss, forward and backward by hand, so that no probabilities are kept (PaLM's loss)."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

IGNORE = -100
Z = 1e-3


class ZCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, labels):
        keep = labels != IGNORE
        count = keep.sum().clamp(min=1)
        safe = labels.masked_fill(~keep, 0)
        lse = logits.logsumexp(-1)
        nll = lse - logits.gather(-1, safe[..., None]).squeeze(-1)
        ctx.save_for_backward(logits, safe, keep, lse, count)
        return ((nll + Z * lse**2) * keep).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        logits, safe, keep, lse, count = ctx.saved_tensors
        grad = (logits - lse[..., None]).exp_()
        grad.mul_((1 + Z * lse)[..., None])
        grad.scatter_add_(-1, safe[..., None], -torch.ones_like(lse)[..., None])
        grad.mul_((keep * (upstream / count))[..., None])
        return grad, None


subject = Subject(
    kind="loss",
    name="z-loss",
    forward=lambda m, logits, labels: ZCrossEntropy.apply(logits, labels),
    declares={"z_loss": Z, "ignore_index": IGNORE, "empty_loss": "zero", "once_differentiable": True},
)
