"""Grouped-query attention with a hand-written backward; keys and values are expanded in the forward only."""
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        rep = q.shape[1] // k.shape[1]
        kx, vx = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
        scale = q.shape[-1] ** -0.5
        s = torch.einsum("bhtk,bhsk->bhts", q, kx) * scale
        s = s.masked_fill(~allowed, float("-inf"))
        top = s.amax(-1, keepdim=True)
        p = torch.exp(s - torch.where(top == float("-inf"), torch.zeros_like(top), top))
        z = p.sum(-1, keepdim=True)
        p = p / torch.where(z == 0, torch.ones_like(z), z)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.rep = scale, rep
        return torch.einsum("bhts,bhse->bhte", p, vx)

    @staticmethod
    @once_differentiable
    def backward(ctx, go):
        q, k, v, p = ctx.saved_tensors
        rep, scale = ctx.rep, ctx.scale
        groups = k.shape[1]

        def fold(grad):  # [B, H, S, *] -> [B, G, S, *]
            b, h, s, w = grad.shape
            return grad.reshape(b, groups, rep, s, w).sum(2)

        kx, vx = k.repeat_interleave(rep, dim=1), v.repeat_interleave(rep, dim=1)
        dv = torch.einsum("bhts,bhte->bhse", p, go)
        dp = torch.einsum("bhte,bhse->bhts", go, vx)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("bhts,bhsk->bhtk", ds, kx)
        dk = torch.einsum("bhts,bhtk->bhsk", ds, q)
        return dq, fold(dk), fold(dv), None


def attend(model, q, k, v, attention_mask=None, causal=False):
    t, s = q.shape[-2], k.shape[-2]
    allowed = torch.ones(t, s, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(s - t)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed.expand(q.shape[0], q.shape[1], t, s))


subject = Subject(
    kind="attention",
    name="GQA kernel",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
