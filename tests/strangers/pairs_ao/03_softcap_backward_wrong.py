WHAT = "the backward of c*tanh(s/c) takes 1 - capped**2 for 1 - (capped/c)**2, so the gradients of q and k are wrong (line 38)."
"""Soft-capped attention with its own backward: scores are recomputed from q, k and the row's log-sum-exp."""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CAP = 10.0


def _capped(q, k, scale):
    return torch.tanh(q @ k.mT * (scale / CAP)) * CAP


class CappedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        scale = q.shape[-1] ** -0.5
        scores = _capped(q, k, scale).masked_fill_(~allowed, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        out = (scores - lse).exp_() @ v
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, allowed, lse, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, allowed, lse, out = ctx.saved_tensors
        capped = _capped(q, k, ctx.scale)
        p = (capped - lse).exp().masked_fill(~allowed, 0.0)
        d_v = p.mT @ d_out
        delta = (d_out * out).sum(-1, keepdim=True)
        d_capped = p * (d_out @ v.mT - delta)
        d_scores = d_capped * (1.0 - capped.square())
        return d_scores @ k * ctx.scale, d_scores.mT @ q * ctx.scale, d_v, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    dtype, (T, S) = q.dtype, (q.shape[-2], k.shape[-2])
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & (attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask)
    return CappedAttention.apply(q, k, v, allowed.expand(*q.shape[:-1], S)).to(dtype)


subject = Subject(
    kind="attention",
    name="soft-capped attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "soft_cap": CAP,
        "empty_row": "zeros",
        "causal_alignment": "bottom-right",
        "grouped_queries": True,
        "once_differentiable": True,
    },
)
