"""Grouped-query attention whose backward recomputes the weights from the saved log-sum-exp (FlashAttention-2, without tiles)."""
import math

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def widen(t):
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def weights(q, k, allowed, lse=None):
        score = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
        if lse is None:
            lse = score.logsumexp(-1, keepdim=True)
            lse = torch.where(lse == -math.inf, torch.zeros_like(lse), lse)
        return (score - lse).exp(), lse

    @staticmethod
    def forward(ctx, q, k, v, allowed):
        repeat = q.shape[1] // k.shape[1]
        q_, k_, v_ = widen(q), widen(k).repeat_interleave(repeat, 1), widen(v).repeat_interleave(repeat, 1)
        p, lse = GroupedAttention.weights(q_, k_, allowed)
        out = p @ v_
        ctx.save_for_backward(q, k, v, allowed, lse, out)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, allowed, lse, out = ctx.saved_tensors
        groups, repeat = k.shape[1], q.shape[1] // k.shape[1]
        q_, k_, v_ = widen(q), widen(k).repeat_interleave(repeat, 1), widen(v).repeat_interleave(repeat, 1)
        grad = widen(grad)
        p, _ = GroupedAttention.weights(q_, k_, allowed, lse)
        delta = (grad * out).sum(-1, keepdim=True)
        ds = p * (grad @ v_.transpose(-1, -2) - delta) / math.sqrt(q.shape[-1])
        dq = ds @ k_
        dk, dv = ds.transpose(-1, -2) @ q_, p.transpose(-1, -2) @ grad
        # every key-value head served `repeat` query heads
        dk = dk.unflatten(1, (groups, repeat)).sum(2)
        dv = dv.unflatten(1, (groups, repeat)).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    S = k.shape[2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    with torch.autocast(q.device.type, enabled=False):
        return GroupedAttention.apply(q, k, v, allowed.expand(B, H, T, S))


subject = Subject(
    kind="attention",
    name="grouped attention, backward by hand",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
