WHAT = "behind line 34, where a line is missing: the backward that is written by hand forgets the derivative of the tanh of the soft cap, 1 - tanh^2, in the gradient of queries and keys"
"""Attention with capped scores, as in Gemma 2, with a backward of its own that stores no weights."""

import math

import torch

from veriformer.properties import Subject

CAP = 5.0


def capped_scores(q, k):
    return CAP * torch.tanh(q @ k.mT / (math.sqrt(q.shape[-1]) * CAP))


class CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible):
        s = capped_scores(q, k).masked_fill(~visible, -torch.inf)
        lse = s.logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        out = torch.exp(s - lse) @ v
        ctx.save_for_backward(q, k, v, visible, lse, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        q, k, v, visible, lse, out = ctx.saved_tensors
        s = capped_scores(q, k)
        p = torch.exp(s.masked_fill(~visible, -torch.inf) - lse)
        delta = (d_out * out).sum(-1, keepdim=True)
        ds = p * (d_out @ v.mT - delta)
        ds = ds / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, p.mT @ d_out, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    S = k.shape[-2]
    visible = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril()
    if attention_mask is not None:
        visible = visible & attention_mask
    return CappedAttention.apply(q, k, v, visible.expand(B, H, T, S))


subject = Subject(
    kind="attention",
    name="capped attention",
    build=lambda c: None,
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "soft_cap": CAP,
        "once_differentiable": True,
        "causal_alignment": "top-left",
        "empty_row": "zeros",
        "grouped_queries": True,
    },
)
