"""Online softmax along any axis: one pass for the normaliser, one for the weights, and its own backward."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

BLOCK = 16


class OnlineSoftmax(Function):
    @staticmethod
    def forward(ctx, scores, dim):
        work = scores.to(torch.promote_types(scores.dtype, torch.float32)).movedim(dim, -1)
        top = torch.full_like(work[..., :1], -torch.inf)
        total = torch.zeros_like(top)
        for block in work.split(BLOCK, dim=-1):
            best = torch.maximum(top, block.amax(-1, keepdim=True))
            pivot = torch.where(best.isinf(), torch.zeros_like(best), best)
            total = total * (top - pivot).exp() + (block - pivot).exp().sum(-1, keepdim=True)
            top = best
        p = ((work - top).exp() / total).movedim(-1, dim)
        ctx.save_for_backward(p)
        ctx.dim = dim
        return p.to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        weighted = p * grad
        inner = weighted.sum(ctx.dim, keepdim=True)
        return (weighted - p * inner).to(grad.dtype), None


def softmax(scores, dim=-1):
    return OnlineSoftmax.apply(scores, dim)


subject = Subject(
    kind="softmax",
    name="online softmax",
    forward=lambda model, scores, dim=-1: softmax(scores, dim),
    declares={"once_differentiable": True},
)
