WHAT = "The backward adds up the gradients of keys and values over heads as if they had been repeated by tiling, though repeat_interleave made them: heads of keys get the gradients of other groups, line 40."
"""Grouped-query attention as one autograd function."""

import torch

from veriformer.properties import Subject


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        groups = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("bhtk,bhsk->bhts", q, keys) * scale
        scores = scores.masked_fill(~allowed, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        p = (scores - top.masked_fill(top.isinf(), 0.0)).exp()
        total = p.sum(-1, keepdim=True)
        p = p / total.masked_fill(total == 0, 1.0)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return torch.einsum("bhts,bhse->bhte", p, values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        heads, kv_heads = q.shape[1], k.shape[1]
        groups = heads // kv_heads
        keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

        dv = torch.einsum("bhts,bhte->bhse", p, do)
        dp = torch.einsum("bhte,bhse->bhts", do, values)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bhts,bhsk->bhtk", ds, keys)
        dk = torch.einsum("bhts,bhtk->bhsk", ds, q)

        # queries that share a head of keys and values add up
        dk = dk.unflatten(1, (groups, kv_heads)).sum(1)
        dv = dv.unflatten(1, (groups, kv_heads)).sum(1)
        return dq, dk, dv, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="grouped-query attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "top-left",
        "once_differentiable": True,
    },
)
