WHAT = "in the backward the gradients of keys and values are summed over the wrong axis: heads are viewed as (rep, groups) instead of (groups, rep), so that a key-value head gets those of other groups' query heads: line 39."
"""Grouped-query attention with a backward of its own: weights are kept, nothing else of size T x S."""

import torch
from torch.autograd.function import Function, once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed, scale):
        rep = q.shape[1] // k.shape[1]
        k_all = k.repeat_interleave(rep, dim=1)
        v_all = v.repeat_interleave(rep, dim=1)
        s = torch.matmul(q, k_all.transpose(-2, -1)).mul_(scale).masked_fill_(~allowed, float("-inf"))
        m = s.amax(-1, keepdim=True)
        p = s.sub_(m.masked_fill(m.isinf(), 0.0)).exp_()
        z = p.sum(-1, keepdim=True)
        p = p.div_(z.masked_fill(z == 0, 1.0))
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return torch.matmul(p, v_all)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        batch, groups, keys, width = k.shape
        rep = q.shape[1] // groups
        k_all = k.repeat_interleave(rep, dim=1)
        v_all = v.repeat_interleave(rep, dim=1)
        dv = torch.matmul(p.transpose(-2, -1), do)
        dp = torch.matmul(do, v_all.transpose(-2, -1))
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.matmul(ds, k_all)
        dk = torch.matmul(ds.transpose(-2, -1), q)
        # a key-value head has the gradients of all query heads that share it
        dk = dk.reshape(batch, rep, groups, keys, width).sum(1)
        dv = dv.reshape(batch, rep, groups, keys, v.shape[-1]).sum(1)
        return dq, dk, dv, None, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        if attention_mask.dim() == 3:
            attention_mask = attention_mask[:, None]
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed.expand(*q.shape[:-1], S), q.shape[-1] ** -0.5)


subject = Subject(
    kind="attention",
    name="grouped attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
