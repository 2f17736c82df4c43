"""Attention that keeps the log-sum-exp alone and recomputes the weights in the backward pass."""
import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


def visible(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if mask is not None:
        allowed = allowed & mask
    return allowed


class Recomputed(Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, causal):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible(q, k, mask, causal), -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        lse = torch.where(lse.isinf(), -lse, lse)  # +inf: no key at all, weights 0
        out = torch.exp(scores - lse) @ v
        ctx.save_for_backward(q, k, v, mask, lse, out)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, mask, lse, out = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        scores = (q @ k.mT * scale).masked_fill(~visible(q, k, mask, ctx.causal), -math.inf)
        p = torch.exp(scores - lse)
        delta = (d_out * out).sum(-1, keepdim=True)
        ds = p * (d_out @ v.mT - delta) * scale
        return ds @ k, ds.mT @ q, p.mT @ d_out, None, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return Recomputed.apply(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="attention with recomputed weights",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "grouped_queries": True,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "once_differentiable": True,
    },
)
