"""Attention with soft-capped scores (Gemma 2) and a backward written by hand."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

WHAT = "The hand-written backward forgets the derivative of the soft cap, 1 - tanh^2."
CAUSE = (
    "The forward is right, but in the backward the gradient of queries and keys lacks the factor 1 - tanh(s/c)^2 of the "
    "soft cap; that of the values is right."
)
CAP = 4.0


def make(derivative):
    class CappedAttention(Function):
        @staticmethod
        def forward(ctx, q, k, v, allowed):
            raw = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            tanh = torch.tanh(raw / CAP)
            scores = (CAP * tanh).masked_fill(~allowed, -torch.inf)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
            total = weights.sum(-1, keepdim=True)
            weights = weights / torch.where(total == 0, 1.0, total)
            ctx.save_for_backward(q, k, v, weights, tanh)
            return weights @ v

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            q, k, v, weights, tanh = ctx.saved_tensors
            d_weights = grad @ v.transpose(-1, -2)
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
            d_raw = derivative(d_scores, tanh) * q.shape[-1] ** -0.5
            return d_raw @ k, d_raw.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad, None

    def attend(model, q, k, v, attention_mask=None, causal=False):
        T, S = q.shape[-2], k.shape[-2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril(S - T)
        if attention_mask is not None:
            extra = attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask
            allowed = allowed & extra
        dtype = q.dtype
        if dtype in (torch.float16, torch.bfloat16):
            q, k, v = q.float(), k.float(), v.float()
        return CappedAttention.apply(q, k, v, allowed.expand(*q.shape[:-1], S)).to(dtype)

    return attend


def subject(derivative):
    return Subject(
        kind="attention",
        name="soft-capped attention",
        forward=make(derivative),
        mask_forms=("pairwise",),
        declares={
            "soft_cap": CAP,
            "once_differentiable": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
        },
    )


right = subject(lambda d_scores, tanh: d_scores * (1 - tanh * tanh))
wrong = subject(lambda d_scores, tanh: d_scores)
