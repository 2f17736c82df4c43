WHAT = 'the backward takes the diagonal of the Jacobian alone, s (1 - s) as for a sigmoid (line 21), the terms -s_i s_j are lost'
"""Assignment 1: softmax, forward and backward by hand."""
import torch

from veriformer.properties import Subject


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, dim):
        shifted = scores - scores.max(dim=dim, keepdim=True).values
        exp = torch.exp(shifted)
        s = exp / exp.sum(dim=dim, keepdim=True)
        ctx.save_for_backward(s)
        ctx.dim = dim
        return s

    @staticmethod
    def backward(ctx, upstream):
        (s,) = ctx.saved_tensors
        # ds/dx = s (1 - s)
        dscores = upstream * s * (1.0 - s)
        return dscores, None


def softmax(scores, dim=-1):
    return Softmax.apply(scores, dim)


subject = Subject(
    kind="softmax",
    name="softmax by hand",
    forward=lambda model, scores, dim=-1: softmax(scores, dim),
)
