WHAT = 'The backward sums the gradients of keys and values over heads as if the repetition had been tiled (g0 g1 g0 g1) where the forward interleaves (g0 g0 g1 g1): gradients go to the wrong key-value heads as soon as there are several of them with several queries each; line 40: `d_k = d_k.view(batch, ctx.groups, kv_heads, *d_k.shape[2:]).sum(1)`.'
"""Grouped-query attention as one autograd function: keys and values are not kept repeated for the backward."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, visible):
        groups = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        scores = (q * scale) @ k.repeat_interleave(groups, dim=1).mT
        scores = scores.masked_fill(~visible, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top.isinf(), torch.zeros_like(top), top)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True)
        p = p / torch.where(total == 0, torch.ones_like(total), total)
        out = p @ v.repeat_interleave(groups, dim=1)
        ctx.scale, ctx.groups = scale, groups
        ctx.save_for_backward(q, k, v, p, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, p, out = ctx.saved_tensors
        batch, kv_heads = k.shape[:2]
        k_full = k.repeat_interleave(ctx.groups, dim=1)
        v_full = v.repeat_interleave(ctx.groups, dim=1)
        delta = (d_out * out).sum(-1, keepdim=True)
        d_scores = p * (d_out @ v_full.mT - delta)
        d_q = d_scores @ k_full * ctx.scale
        d_k = d_scores.mT @ q * ctx.scale
        d_v = p.mT @ d_out
        d_k = d_k.view(batch, ctx.groups, kv_heads, *d_k.shape[2:]).sum(1)
        d_v = d_v.view(batch, ctx.groups, kv_heads, *d_v.shape[2:]).sum(1)
        return d_q, d_k, d_v, None


def grouped_attention(model, q, k, v, attention_mask=None, causal=False):
    rows, cols = q.shape[-2], k.shape[-2]
    visible = torch.ones(rows, cols, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril()
    if attention_mask is not None:
        visible = visible & attention_mask
    return GroupedAttention.apply(q, k, v, visible)


subject = Subject(
    kind="attention",
    name="grouped-query kernel",
    forward=grouped_attention,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "top-left",
        "once_differentiable": True,
    },
)
