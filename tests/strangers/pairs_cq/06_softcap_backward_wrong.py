"""Soft-capped attention with a backward written by hand (a port of a fused kernel)."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CAP = 3.0


class Capped(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        scale = q.shape[-1] ** -0.5
        capped = CAP * torch.tanh(scale * (q @ k.mT) / CAP)
        scores = capped.masked_fill(~allowed, -torch.inf)
        # Capped scores lie within +-CAP: no maximum has to be taken off before exp.
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
        out = weights @ v
        ctx.save_for_backward(q, k, v, weights, capped, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, weights, capped, out = ctx.saved_tensors
        delta = (grad * out).sum(-1, keepdim=True)
        d_capped = weights * (grad @ v.mT - delta)
        d_scores = d_capped * (1 - capped.square())
        d_q = ctx.scale * (d_scores @ k)
        d_k = ctx.scale * (d_scores.mT @ q)
        return d_q, d_k, weights.mT @ grad, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    t, s = q.shape[-2], k.shape[-2]
    allowed = torch.ones(t, s, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(s - t)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return Capped.apply(q, k, v, allowed.expand(*q.shape[:-1], s))


subject = Subject(
    kind="attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "soft_cap": CAP,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)

WHAT = 'Line 33: The derivative of CAP * tanh(s / CAP) is 1 - tanh^2, but what was saved is CAP * tanh and is squared without being divided by CAP: gradients of queries and keys are wrong.'
