import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The autograd.Function keeps the weights as an attribute (ctx.p, computed without a graph) instead of '
    'recomputing them from saved tensors, and its backward is not marked once_differentiable, so second '
    'derivatives are silently wrong because the weights count as constants.'
)
PLACE = 'double backward of the attention autograd.Function'


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


def weights_of(q, k, mask):
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0.0)


class SavingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask):
        p = weights_of(q, k, mask)
        ctx.save_for_backward(q, k, v, mask)
        return p @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask = ctx.saved_tensors
        p = weights_of(q, k, mask)
        dp = grad @ v.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad, None


class SavingAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        with torch.autocast(q.device.type, enabled=False):
            return SavingFunction.apply(q, k, v, mask)


def weights_of2(q, k, mask):
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0.0)


class SavingFunction2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask):
        p = weights_of2(q, k, mask)
        ctx.save_for_backward(q, k, v, mask)
        ctx.p = p
        return p @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask = ctx.saved_tensors
        p = ctx.p
        dp = grad @ v.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad, None


class SavingAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        with torch.autocast(q.device.type, enabled=False):
            return SavingFunction2.apply(q, k, v, mask)


right = Subject(
    kind="attention",
    build=lambda c: SavingAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: SavingAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
