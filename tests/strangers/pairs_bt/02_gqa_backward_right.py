"""Grouped-query attention in one Function: recomputes nothing, keeps the weights."""
import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def visible(queries, keys, causal, mask, device):
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed.tril(keys - queries)
    return allowed if mask is None else allowed & mask


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        ctx.dtype = q.dtype
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        repeats = q.shape[1] // k.shape[1]
        kk = k.repeat_interleave(repeats, dim=1)
        vv = v.repeat_interleave(repeats, dim=1)
        scale = 1.0 / math.sqrt(q.shape[-1])
        s = (q @ kk.mT * scale).masked_fill(~allowed, -torch.inf)
        top = s.amax(-1, keepdim=True)
        p = (s - top.masked_fill(top.isinf(), 0.0)).exp()
        total = p.sum(-1, keepdim=True)
        p = p / total.masked_fill(total == 0, 1.0)
        ctx.save_for_backward(q, kk, vv, p)
        ctx.scale, ctx.groups = scale, k.shape[1]
        return (p @ vv).to(ctx.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, kk, vv, p = ctx.saved_tensors
        do = do.to(p.dtype)
        dv = p.mT @ do
        dp = do @ vv.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
        dq = ds @ kk
        dk = ds.mT @ q

        def fold(g):
            batch, heads, length, width = g.shape
            return g.reshape(batch, ctx.groups, heads // ctx.groups, length, width).sum(2)

        return dq.to(ctx.dtype), fold(dk).to(ctx.dtype), fold(dv).to(ctx.dtype), None


def attend(model, q, k, v, attention_mask=None, causal=False):
    if q.shape[1] % k.shape[1]:
        raise ValueError("heads must be a multiple of key-value heads")
    allowed = visible(q.shape[-2], k.shape[-2], causal, attention_mask, q.device)
    return GroupedAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="grouped attention, own backward",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
