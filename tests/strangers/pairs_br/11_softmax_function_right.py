"""Softmax along any axis with a backward of its own that keeps the output alone."""
import torch
from torch.autograd import Function

from veriformer.properties import Subject


class LeanSoftmax(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scores, dim):
        peak = scores.amax(dim, keepdim=True)
        e = torch.exp(scores - peak)
        return e / e.sum(dim, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        inner = (grad * y).sum(ctx.dim, keepdim=True)
        return y * (grad - inner), None


subject = Subject(
    kind="softmax",
    name="lean softmax",
    forward=lambda model, scores, dim=-1: LeanSoftmax.apply(scores, dim),
    declares={"empty_row": "nan"},
)
