WHAT = 'The hand-written backward of the softmax (line 26) sums grad * p over the last axis instead of over the axis `dim` along which the forward normalised: the gradient is wrong whenever dim is not the last one.'
# Softmax along any axis that keeps only its output for the backward pass.
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class SlimSoftmax(Function):
    """Saves p instead of the scores and of the exponentials."""

    @staticmethod
    def forward(ctx, scores, dim):
        p = scores - scores.amax(dim, keepdim=True)
        p.exp_()
        p.div_(p.sum(dim, keepdim=True))
        ctx.save_for_backward(p)
        ctx.dim = dim
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        dot = (grad * p).sum(-1, keepdim=True)
        return p * (grad - dot), None


def softmax(scores, dim=-1):
    return SlimSoftmax.apply(scores, dim)


subject = Subject(
    kind="softmax",
    name="slim softmax",
    forward=lambda model, scores, dim=-1: softmax(scores, dim),
    declares={"once_differentiable": True},
)
