import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The backward regenerates the dropout mask from the saved seed in key-major order ([S, T], '
    'transposed) while the forward drew it query-major, so in train mode the gradients belong to other '
    'dropped weights than the output.'
)
PLACE = 'backward of the attention autograd.Function, regenerated dropout mask'


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


def keep(seed, shape, p, like):
    """The dropout mask of a seed, already divided by the share kept."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    drawn = torch.rand(shape, generator=generator, device=like.device)
    return (drawn >= p).to(like.dtype) / (1 - p)


class SeededFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, p, seed):
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        ctx.save_for_backward(q, k, v, weights)
        ctx.p, ctx.seed = p, seed
        if p > 0:
            weights = weights * keep(seed, weights.shape, p, q)
        return weights @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        dropped, dw = weights, grad @ v.transpose(-1, -2)
        if ctx.p > 0:
            kept = keep(ctx.seed, weights.shape, ctx.p, q)
            dropped, dw = weights * kept, dw * kept
        ds = weights * (dw - (dw * weights).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
        return ds @ k, ds.transpose(-1, -2) @ q, dropped.transpose(-1, -2) @ grad, None, None, None


class SeededAttention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        p, seed = (self.p if self.training else 0.0), 0
        if p > 0:
            seed = int(torch.randint(2**31, ()))
        with torch.autocast(q.device.type, enabled=False):
            return SeededFunction.apply(q, k, v, mask, p, seed)


def keep2(seed, shape, p, like, key_major=False):
    """The dropout mask of a seed, already divided by the share kept."""
    if key_major:
        return keep2(seed, (*shape[:2], shape[3], shape[2]), p, like).transpose(-1, -2)
    generator = torch.Generator(device=like.device).manual_seed(seed)
    drawn = torch.rand(shape, generator=generator, device=like.device)
    return (drawn >= p).to(like.dtype) / (1 - p)


class SeededFunction2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, p, seed):
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        ctx.save_for_backward(q, k, v, weights)
        ctx.p, ctx.seed = p, seed
        if p > 0:
            weights = weights * keep2(seed, weights.shape, p, q)
        return weights @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, weights = ctx.saved_tensors
        dropped, dw = weights, grad @ v.transpose(-1, -2)
        if ctx.p > 0:
            kept = keep2(ctx.seed, weights.shape, ctx.p, q, key_major=True)
            dropped, dw = weights * kept, dw * kept
        ds = weights * (dw - (dw * weights).sum(-1, keepdim=True)) * q.size(-1) ** -0.5
        return ds @ k, ds.transpose(-1, -2) @ q, dropped.transpose(-1, -2) @ grad, None, None, None


class SeededAttention2(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        p, seed = (self.p if self.training else 0.0), 0
        if p > 0:
            seed = int(torch.randint(2**31, ()))
        with torch.autocast(q.device.type, enabled=False):
            return SeededFunction2.apply(q, k, v, mask, p, seed)


right = Subject(
    kind="attention",
    build=lambda c: SeededAttention(c.dropout),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: SeededAttention2(c.dropout),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
)
