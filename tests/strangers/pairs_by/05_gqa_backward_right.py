"""Grouped-query attention as one autograd.Function: the gradients of shared heads are summed over their queries."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GQA(Function):
    @staticmethod
    def forward(ctx, q, k, v, bias):
        rep = q.size(1) // k.size(1)
        kk, vv = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        scale = q.size(-1) ** -0.5
        s = torch.matmul(q, kk.transpose(-1, -2)).mul_(scale).add_(bias)
        p = torch.nan_to_num(torch.softmax(s, -1), nan=0.0)
        ctx.scale, ctx.rep = scale, rep
        ctx.save_for_backward(q, kk, vv, p)
        return torch.matmul(p, vv)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, kk, vv, p = ctx.saved_tensors
        B, H = q.shape[:2]
        G, R = H // ctx.rep, ctx.rep
        dv = torch.matmul(p.transpose(-1, -2), do)
        dp = torch.matmul(do, vv.transpose(-1, -2))
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.matmul(ds, kk)
        dk = torch.matmul(ds.transpose(-1, -2), q)
        dk = dk.reshape(B, G, R, *dk.shape[2:]).sum(2)
        dv = dv.reshape(B, G, R, *dv.shape[2:]).sum(2)
        return dq, dk, dv, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.size(2), k.size(2)
    bias = q.new_zeros(T, S)
    if causal:
        bias = bias.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if attention_mask is not None:
        bias = torch.where(attention_mask, bias, -torch.inf)
    return GQA.apply(q, k, v, bias)


subject = Subject(
    kind="attention",
    name="GQA with its backward",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros",
        "causal_alignment": "top-left",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
