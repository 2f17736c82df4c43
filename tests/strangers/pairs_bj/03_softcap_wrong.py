WHAT = "The backward's derivative of the soft cap is 1 - s^2 / CAP instead of 1 - (s / CAP)^2 (line 40): the square stands inside the division, so gradients of q and k are wrong; the forward and dv are right."
"""Gemma-2 attention: capped scores, forward keeps the log-sum alone, backward makes the weights again."""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CAP = 4.0


def capped_scores(q, k, scale):
    raw = torch.einsum("bhtk,bhsk->bhts", q, k) * scale
    return CAP * torch.tanh(raw / CAP)


class CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias):
        scale = q.shape[-1] ** -0.5
        s = capped_scores(q, k, scale) + bias
        lse = torch.logsumexp(s, -1, keepdim=True)
        lse = torch.where(lse.isinf(), torch.full_like(lse, torch.inf), lse)  # no key: weights of zero
        w = torch.exp(s - lse)
        o = torch.einsum("bhts,bhse->bhte", w, v)
        ctx.save_for_backward(q, k, v, bias, lse, o)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, bias, lse, o = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        capped = capped_scores(q, k, scale)
        w = torch.exp(capped + bias - lse)
        delta = (do * o).sum(-1, keepdim=True)
        dv = torch.einsum("bhts,bhte->bhse", w, do)
        dw = torch.einsum("bhte,bhse->bhts", do, v)
        ds = w * (dw - delta)
        ds = ds * (1.0 - capped.square() / CAP)
        dq = torch.einsum("bhts,bhsk->bhtk", ds, k) * scale
        dk = torch.einsum("bhts,bhtk->bhsk", ds, q) * scale
        return dq, dk, dv, None


def forward(model, q, k, v, attention_mask=None, causal=False):
    rep = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(rep, 1) for t in (k, v))
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(k.shape[2] - q.shape[2])
    if attention_mask is not None:
        allowed = allowed & attention_mask
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~allowed, -torch.inf)
    return CappedAttention.apply(q, k, v, bias.expand(q.shape[0], q.shape[1], -1, -1))


subject = Subject(
    kind="attention",
    name="capped attention",
    forward=forward,
    mask_forms=("pairwise",),
    declares={
        "soft_cap": CAP,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
