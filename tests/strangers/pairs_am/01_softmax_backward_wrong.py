WHAT = 'The hand-written backward sums over the last axis rather than over the axis of the softmax: gradients are wrong whenever dim is not -1 (line 27, the inner product in backward).'
"""Memory-lean softmax: keeps only the output for the backward pass."""
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        given = x.dtype
        x = x.float() if given in (torch.float16, torch.bfloat16) else x
        top = x.amax(dim, keepdim=True)
        e = torch.exp(x - torch.where(torch.isinf(top), torch.zeros_like(top), top))
        z = e.sum(dim, keepdim=True)
        y = e / torch.where(z == 0, torch.ones_like(z), z)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y.to(given)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        inner = (grad * y).sum(-1, keepdim=True)
        return (y * (grad - inner)).to(grad.dtype), None


class LeanSoftmax(nn.Module):
    def forward(self, scores, dim=-1):
        return _Softmax.apply(scores, dim)


subject = Subject(
    kind="softmax",
    name="lean softmax",
    build=lambda c: LeanSoftmax(),
    forward=lambda m, scores, dim=-1: m(scores, dim),
    declares={"once_differentiable": True},
)
