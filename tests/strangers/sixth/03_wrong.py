"""Grouped-query attention as one autograd Function: G key-value heads serve H query heads, weights are recomputed."""

import torch
from torch.autograd.function import Function, once_differentiable

from veriformer.properties import Subject


def _weights(q, k, allowed):
    """q [B,H,T,K], k [B,H,S,K] -> softmax weights; rows that see nothing are zero."""
    s = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5
    s = s.masked_fill(~allowed, -torch.inf)
    m = s.amax(-1, keepdim=True)
    m = torch.where(torch.isneginf(m), torch.zeros_like(m), m)
    e = torch.exp(s - m)
    z = e.sum(-1, keepdim=True)
    return e / torch.where(z == 0, torch.ones_like(z), z)


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        ctx.save_for_backward(q, k, v, allowed)
        n = q.shape[1] // k.shape[1]
        work = torch.promote_types(q.dtype, torch.float32)
        qf = q.to(work)
        kf = k.to(work).repeat_interleave(n, dim=1)
        vf = v.to(work).repeat_interleave(n, dim=1)
        return torch.matmul(_weights(qf, kf, allowed), vf).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, allowed = ctx.saved_tensors
        B, H, T, K = q.shape
        G, S, E = k.shape[1], k.shape[2], v.shape[3]
        n = H // G
        work = torch.promote_types(q.dtype, torch.float32)
        qf, do = q.to(work), do.to(work)
        kf = k.to(work).repeat_interleave(n, dim=1)
        vf = v.to(work).repeat_interleave(n, dim=1)
        p = _weights(qf, kf, allowed)
        dp = torch.matmul(do, vf.mT)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * K**-0.5
        dq = torch.matmul(ds, kf)
        dk = torch.matmul(ds.mT, qf).reshape(B, n, G, S, K).sum(1)
        dv = torch.matmul(p.mT, do).reshape(B, n, G, S, E).sum(1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def gqa(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[2], k.shape[2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & (attention_mask if attention_mask.ndim == 2 else attention_mask[:, None])
    return GroupedAttention.apply(q, k, v, allowed)


subject = Subject(
    kind="attention",
    name="gqa",
    forward=gqa,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "causal_alignment": "bottom-right",
        "empty_row": "zeros",
        "once_differentiable": True,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "half_precision": True,
    },
)
