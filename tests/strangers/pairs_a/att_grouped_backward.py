import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'In the hand-written backward of grouped-query attention the gradients of the expanded keys and '
    'values are summed over the wrong axis of the (group, repeat) split, so dK and dV of each group '
    'collect those of other groups; the forward is right.'
)
PLACE = 'backward of the grouped-query autograd.Function, reduction to key-value heads'


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


class GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask):
        rep = q.size(1) // k.size(1)
        kx, vx = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        scores = q @ kx.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        p = scores.softmax(-1)
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        ctx.save_for_backward(q, k, v, p)
        return p @ vx

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        groups, rep = k.size(1), q.size(1) // k.size(1)
        kx, vx = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        dp = grad @ vx.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
        dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
        dk, dv = dk.unflatten(1, (groups, rep)).sum(2), dv.unflatten(1, (groups, rep)).sum(2)
        return ds @ kx, dk, dv, None


class GroupedKernel(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        with torch.autocast(q.device.type, enabled=False):
            return GroupedFunction.apply(q, k, v, mask)


class GroupedFunction2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask):
        rep = q.size(1) // k.size(1)
        kx, vx = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        scores = q @ kx.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        p = scores.softmax(-1)
        if mask is not None:
            p = p.masked_fill(~mask, 0.0)
        ctx.save_for_backward(q, k, v, p)
        return p @ vx

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        groups, rep = k.size(1), q.size(1) // k.size(1)
        kx, vx = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        dp = grad @ vx.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
        dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
        dk, dv = dk.unflatten(1, (rep, groups)).sum(1), dv.unflatten(1, (rep, groups)).sum(1)
        return ds @ kx, dk, dv, None


class GroupedKernel2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        with torch.autocast(q.device.type, enabled=False):
            return GroupedFunction2.apply(q, k, v, mask)


right = Subject(
    kind="attention",
    build=lambda c: GroupedKernel(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
    domain={"num_heads": [4, 8], "num_key_value_heads": [2]},
)

wrong = Subject(
    kind="attention",
    build=lambda c: GroupedKernel2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
    domain={"num_heads": [4, 8], "num_key_value_heads": [2]},
)
