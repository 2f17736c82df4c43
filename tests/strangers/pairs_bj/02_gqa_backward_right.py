"""Grouped-query attention with a backward of its own."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    """q [B,H,T,K], k [B,G,S,K], v [B,G,S,E]; head h reads key-value head h // (H // G)."""

    @staticmethod
    def forward(ctx, q, k, v, visible):
        rep = q.size(1) // k.size(1)
        kk = k.repeat_interleave(rep, dim=1)
        vv = v.repeat_interleave(rep, dim=1)
        scale = q.size(-1) ** -0.5
        s = torch.matmul(q, kk.transpose(2, 3)).mul_(scale)
        s.masked_fill_(~visible, float("-inf"))
        p = torch.softmax(s, dim=-1)
        p = torch.nan_to_num_(p, nan=0.0)  # rows that see nothing
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return torch.matmul(p, vv)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        B, H, T, K = q.shape
        G, S = k.size(1), k.size(2)
        rep = H // G
        kk = k.repeat_interleave(rep, dim=1)
        vv = v.repeat_interleave(rep, dim=1)
        dv = torch.matmul(p.transpose(2, 3), do)
        dp = torch.matmul(do, vv.transpose(2, 3))
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        ds = ds * ctx.scale
        dq = torch.matmul(ds, kk)
        dk = torch.matmul(ds.transpose(2, 3), q)
        # every key-value head collects what its query heads send
        dk = dk.reshape(B, G, rep, S, K).sum(2)
        dv = dv.reshape(B, G, rep, S, -1).sum(2)
        return dq, dk, dv, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.size(2), k.size(2)
    visible = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(S - T)
    if attention_mask is not None:
        visible = visible & attention_mask
    return GroupedAttention.apply(q, k, v, visible.expand(q.size(0), q.size(1), T, S))


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
