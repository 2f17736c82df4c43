WHAT = "the backward sums over the last dimension whatever dim the forward was given (line 22)."
"""Softmax along any dimension, with a backward that needs the output alone."""
import torch

from veriformer.properties import Subject


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, dim):
        shifted = scores - scores.amax(dim=dim, keepdim=True)
        y = shifted.exp_()
        y /= y.sum(dim=dim, keepdim=True)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        inner = (dy * y).sum(dim=-1, keepdim=True)
        return y * (dy - inner), None


def softmax(model, scores, dim=-1):
    return Softmax.apply(scores, dim)


subject = Subject(
    kind="softmax",
    name="softmax with its own backward",
    forward=softmax,
    declares={"once_differentiable": True},
)
