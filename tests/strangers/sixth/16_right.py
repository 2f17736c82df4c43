"""Attention with capped logits, s <- c tanh(s / c), forward and backward by hand; the log-sum-exp is all that is kept."""

import torch
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

CAP = 15.0


def _capped(q, k, scale):
    return CAP * torch.tanh((q @ k.transpose(-2, -1)) * (scale / CAP))


class CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible):
        dtype = q.dtype
        f = torch.promote_types(dtype, torch.float32)
        scale = q.size(-1) ** -0.5
        s = _capped(q.to(f), k.to(f), scale).masked_fill(~visible, float("-inf"))
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        lse = lse.masked_fill(lse.isneginf(), float("inf"))  # a row that sees nothing: exp(s - inf) = 0
        o = torch.exp(s - lse) @ v.to(f)
        ctx.save_for_backward(q, k, v, visible, o, lse)
        ctx.scale = scale
        return o.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, visible, o, lse = ctx.saved_tensors
        f = o.dtype
        do = do.to(f)
        c = _capped(q.to(f), k.to(f), ctx.scale)
        p = torch.exp(c.masked_fill(~visible, float("-inf")) - lse)
        dv = p.transpose(-2, -1) @ do
        delta = (do * o).sum(-1, keepdim=True)
        ds = p * (do @ v.to(f).transpose(-2, -1) - delta)
        ds = ds * (1 - (c / CAP) ** 2) * ctx.scale
        dq = ds @ k.to(f)
        dk = ds.transpose(-2, -1) @ q.to(f)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def attend(model, q, k, v, attention_mask=None, causal=False):
    visible = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device)
    if causal:
        visible = torch.tril(visible)
    if attention_mask is not None:
        if attention_mask.dim() == 3:
            attention_mask = attention_mask.unsqueeze(1)
        visible = visible & attention_mask
    return CappedAttention.apply(q, k, v, visible)


subject = Subject(
    kind="attention",
    name="capped attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={
        "soft_cap": 15.0,
        "attention_scale": "1/sqrt(d_head)",
        "causal_alignment": "top-left",
        "empty_row": "zeros",
        "once_differentiable": True,
        "memory": "quadratic",
        "half_precision": True,
    },
)
