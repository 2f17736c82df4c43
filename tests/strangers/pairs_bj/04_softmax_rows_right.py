"""Row softmax: any axis is brought to the back, the kernel knows rows alone."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def softmax_rows_(rows):
    """rows [N, S], overwritten."""
    rows -= rows.max(dim=1, keepdim=True).values
    rows.exp_()
    rows /= rows.sum(dim=1, keepdim=True)
    return rows


class RowSoftmax(Function):
    @staticmethod
    def forward(ctx, scores, dim):
        moved = scores.movedim(dim, -1)
        rows = moved.reshape(-1, moved.shape[-1]).clone()
        y = softmax_rows_(rows).view(moved.shape).movedim(-1, dim).contiguous()
        ctx.dim = dim
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dot = (dy * y).sum(dim=ctx.dim, keepdim=True)
        return torch.addcmul(dy * y, y, dot, value=-1), None


subject = Subject(
    kind="softmax",
    name="row softmax",
    forward=lambda model, scores, dim=-1: RowSoftmax.apply(scores, dim),
    declares={"once_differentiable": True},
)
