"""Attention as a torch.autograd.Function with the backward pass written by hand from the saved log-sum-exp.

Unusual: the weights are not saved but computed again in the backward pass, which is for first derivatives alone
(once_differentiable). Causal masks are aligned at the top left. Keys may have fewer heads; their gradients are summed over
the group. A query without any key gives zeros and gets no gradient.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class _Attend(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, q, k, v, seen, scale):  # q [b, g, m, t, d], k and v [b, g, s, d], seen broadcasts to [b, 1, 1, t, s]
        scores = torch.einsum("bgmtd,bgsd->bgmts", q, k).mul_(scale)
        if seen is not None:
            scores.masked_fill_(~seen, float("-inf"))
        lse = scores.logsumexp(dim=-1, keepdim=True)
        p = scores.sub_(lse.masked_fill(lse.isneginf(), 0.0)).exp_()
        out = torch.einsum("bgmts,bgse->bgmte", p, v)
        ctx.save_for_backward(q, k, v, seen, lse, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        q, k, v, seen, lse, out = ctx.saved_tensors
        scores = torch.einsum("bgmtd,bgsd->bgmts", q, k).mul_(ctx.scale)
        if seen is not None:
            scores.masked_fill_(~seen, float("-inf"))
        p = scores.sub_(lse.masked_fill(lse.isneginf(), 0.0)).exp_()
        grad_v = torch.einsum("bgmts,bgmte->bgse", p, grad)
        grad_p = torch.einsum("bgmte,bgse->bgmts", grad, v)
        delta = (grad * out).sum(dim=-1, keepdim=True)
        grad_scores = p.mul_(grad_p.sub_(delta)).mul_(ctx.scale)
        grad_q = torch.einsum("bgmts,bgsd->bgmtd", grad_scores, k)
        grad_k = torch.einsum("bgmts,bgmtd->bgsd", grad_scores, q)
        return grad_q, grad_k, grad_v, None, None


class HandWrittenAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        t, s, groups = q.size(2), k.size(2), k.size(1)
        seen = None
        if causal:
            seen = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()[None, None, None]
        if attention_mask is not None:
            lifted = attention_mask.reshape(-1, 1, 1, t, s)
            seen = lifted if seen is None else seen & lifted
        out = _Attend.apply(q.unflatten(1, (groups, -1)), k, v, seen, q.size(-1) ** -0.5)
        return out.flatten(1, 2)


COMMON = dict(
    kind="attention",
    build=lambda c: HandWrittenAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "once_differentiable": True,
        "empty_row": "zeros",
        "causal_alignment": "top-left",
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
    },
)
