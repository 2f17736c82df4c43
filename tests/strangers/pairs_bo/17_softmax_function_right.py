import torch
from torch.autograd import Function

from veriformer.properties import Subject


class StableSoftmax(Function):
    @staticmethod
    def forward(ctx, scores, dim):
        z = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        z = torch.exp(z - z.amax(dim=dim, keepdim=True))
        y = (z / z.sum(dim=dim, keepdim=True)).to(scores.dtype)
        ctx.dim = dim
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        inner = (grad * y).sum(dim=ctx.dim, keepdim=True)
        return y * (grad - inner), None


def softmax(scores, dim=-1):
    return StableSoftmax.apply(scores, dim)


subject = Subject(
    kind="softmax",
    name="softmax with its own backward",
    forward=lambda model, scores, dim=-1: softmax(scores, dim),
)
