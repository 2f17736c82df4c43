WHAT = "The backward sums over the last dimension instead of the one that the softmax went along: gradients are wrong for every other dim (line 27)."
"""softmax as an autograd function that saves its output alone; a row of nothing but -inf gives zeros."""

import torch
from torch.autograd import Function

from veriformer.properties import Subject


class Softmax(Function):
    @staticmethod
    def forward(ctx, scores, dim):
        best = scores.amax(dim=dim, keepdim=True)
        best = torch.where(torch.isneginf(best), torch.zeros_like(best), best)
        numerator = torch.exp(scores - best)
        total = numerator.sum(dim=dim, keepdim=True)
        probabilities = numerator / torch.where(total == 0, torch.ones_like(total), total)
        ctx.save_for_backward(probabilities)
        ctx.dim = dim
        return probabilities

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        (probabilities,) = ctx.saved_tensors
        weighted = grad_output * probabilities
        return weighted - probabilities * weighted.sum(dim=-1, keepdim=True), None


subject = Subject(
    kind="softmax",
    name="softmax, own backward",
    forward=lambda model, scores, dim=-1: Softmax.apply(scores, dim),
    declares={"once_differentiable": True, "empty_row": "zeros"},
)
