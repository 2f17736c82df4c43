"""Grouped-query attention with a backward of its own (weights are kept, nothing else is recomputed)."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedQueryAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        rep = q.size(1) // k.size(1)
        k_full = k.repeat_interleave(rep, dim=1)
        v_full = v.repeat_interleave(rep, dim=1)
        scale = q.size(-1) ** -0.5
        logits = torch.einsum("bhtk,bhsk->bhts", q, k_full).mul_(scale)
        logits.masked_fill_(~allowed, float("-inf"))
        w = torch.softmax(logits, dim=-1).nan_to_num_(0.0)  # rows that see nothing: zeros
        ctx.save_for_backward(q, k_full, v_full, w)
        ctx.scale, ctx.rep = scale, rep
        return torch.einsum("bhts,bhse->bhte", w, v_full)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, k_full, v_full, w = ctx.saved_tensors
        dw = torch.einsum("bhte,bhse->bhts", g, v_full)
        ds = w * (dw - (dw * w).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bhts,bhsk->bhtk", ds, k_full)
        dk = torch.einsum("bhts,bhtk->bhsk", ds, q)
        dv = torch.einsum("bhts,bhte->bhse", w, g)
        return dq, _reduce_heads(dk, ctx.rep), _reduce_heads(dv, ctx.rep), None


def _reduce_heads(grad, rep):
    """[B, H, S, *] -> [B, G, S, *]: what the query heads of one group ask for is added up."""
    B, H, S, E = grad.shape
    return grad.reshape(B, H // rep, rep, S, E).sum(dim=2)


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.size(-2), k.size(-2)
    allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedQueryAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="GQA function",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "once_differentiable": True,
        "empty_row": "zeros",
        "causal_alignment": "top-left",
    },
)
