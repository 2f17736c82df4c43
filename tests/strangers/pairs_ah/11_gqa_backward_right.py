"""Attention with its own backward, generalised from as many key heads as query heads to fewer (GQA)."""
import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class GroupedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        repeats = q.shape[1] // k.shape[1]
        kx, vx = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        ctx.scale = 1 / math.sqrt(q.shape[-1])
        s = torch.einsum("bhtd,bhsd->bhts", q, kx).mul_(ctx.scale).masked_fill_(~allowed, -torch.inf)
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m.masked_fill(m == -torch.inf, 0))
        z = p.sum(-1, keepdim=True)
        p = p / z.masked_fill(z == 0, 1)
        ctx.save_for_backward(q, kx, vx, p)
        ctx.groups = k.shape[1], repeats
        return torch.einsum("bhts,bhse->bhte", p, vx)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, kx, vx, p = ctx.saved_tensors
        dp = torch.einsum("bhte,bhse->bhts", do, vx)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bhts,bhsd->bhtd", ds, kx)
        dk = torch.einsum("bhts,bhtd->bhsd", ds, q)
        dv = torch.einsum("bhts,bhte->bhse", p, do)
        groups, repeats = ctx.groups
        # what was read by several query heads gets the sum of their gradients
        dk = dk.unflatten(1, (groups, repeats)).sum(2)
        dv = dv.unflatten(1, (groups, repeats)).sum(2)
        return dq, dk, dv, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    T, S = q.shape[2], k.shape[2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return GroupedAttention.apply(q, k, v, allowed.expand(q.shape[0], q.shape[1], T, S))


subject = Subject(
    kind="attention",
    name="grouped attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right", "once_differentiable": True},
)
