WHAT = "The backward sums the gradients of keys and values over heads as if they were tiled (rep, groups), while the forward repeats each group's heads next to one another (line 39): gradients go to wrong groups, the forward is right."
"""Attention with a backward of its own that keeps weights only; grouped-query heads were added to both directions."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        rep = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
        scores = torch.einsum("bhtk,bhsk->bhts", q, keys) * q.shape[-1] ** -0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top.isinf(), 0.0))
        norm = weights.sum(-1, keepdim=True)
        weights = weights / norm.masked_fill(norm == 0, 1.0)
        ctx.save_for_backward(q, k, v, weights)
        return torch.einsum("bhts,bhse->bhte", weights, values)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        rep = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
        scale = q.shape[-1] ** -0.5
        dv = torch.einsum("bhts,bhte->bhse", weights, grad)
        dw = torch.einsum("bhte,bhse->bhts", grad, values)
        ds = weights * (dw - (weights * dw).sum(-1, keepdim=True))
        dq = torch.einsum("bhts,bhsk->bhtk", ds, keys) * scale
        dk = torch.einsum("bhts,bhtk->bhsk", ds, q) * scale
        # every head of a group has read the same keys and values
        dk = dk.unflatten(1, (rep, k.shape[1])).sum(1)
        dv = dv.unflatten(1, (rep, v.shape[1])).sum(1)
        return dq, dk, dv, None


def attention(q, k, v, attention_mask=None, causal=False):
    allowed = attention_mask
    if causal:
        T, S = q.shape[2], k.shape[2]
        past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        allowed = past if allowed is None else allowed & past
    return GroupedAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="grouped attention with its own backward",
    build=lambda c: attention,
    forward=lambda model, q, k, v, attention_mask=None, causal=False: model(q, k, v, attention_mask, causal),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
