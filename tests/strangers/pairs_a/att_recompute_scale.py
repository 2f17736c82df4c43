import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The backward that recomputes the weights from the log-sum-exp multiplies dQ by the softmax scale but '
    "forgets it for dK, so the keys' gradient is too large by sqrt(d_head)."
)
PLACE = 'backward of the fused attention autograd.Function, gradient of the keys'


def full_mask(mask, causal, T, S, device):
    """Boolean, [T, S] or [B, 1, T, S], True where a query may attend; causal is aligned at the bottom right."""
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    if causal:
        past = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
        mask = past if mask is None else mask & past
    return mask


def grow(x, heads):
    """Repeats key-value heads so that there are as many as query heads."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


class FusedFunction(torch.autograd.Function):
    """Saves the log-sum-exp instead of the weights."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        scores = torch.matmul(q, k.mT) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        lse = scores.logsumexp(-1, keepdim=True)
        p = torch.exp(scores - lse)
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        out = torch.matmul(p, v)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, out, lse = ctx.saved_tensors
        scores = torch.matmul(q, k.mT) * ctx.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        p = torch.exp(scores - lse)
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        delta = (grad * out).sum(-1, keepdim=True)
        ds = p * (torch.matmul(grad, v.mT) - delta)
        dq = torch.matmul(ds, k) * ctx.scale
        dk = torch.matmul(ds.mT, q) * ctx.scale
        return dq, dk, torch.matmul(p.mT, grad), None, None


class FusedAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        with torch.autocast(q.device.type, enabled=False):
            return FusedFunction.apply(q, k, v, mask, q.size(-1) ** -0.5)


class FusedFunction2(torch.autograd.Function):
    """Saves the log-sum-exp instead of the weights."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        scores = torch.matmul(q, k.mT) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        lse = scores.logsumexp(-1, keepdim=True)
        p = torch.exp(scores - lse)
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        out = torch.matmul(p, v)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, out, lse = ctx.saved_tensors
        scores = torch.matmul(q, k.mT) * ctx.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        p = torch.exp(scores - lse)
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        delta = (grad * out).sum(-1, keepdim=True)
        ds = p * (torch.matmul(grad, v.mT) - delta)
        dq = torch.matmul(ds, k) * ctx.scale
        dk = torch.matmul(ds.mT, q)
        return dq, dk, torch.matmul(p.mT, grad), None, None


class FusedAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        with torch.autocast(q.device.type, enabled=False):
            return FusedFunction2.apply(q, k, v, mask, q.size(-1) ** -0.5)


right = Subject(
    kind="attention",
    build=lambda c: FusedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: FusedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
)
