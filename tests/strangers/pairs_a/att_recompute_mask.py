import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The tiled backward recomputes the weights from the saved log-sum-exp with the causal rule but '
    'without the attention_mask, so masked keys and values receive gradient (and that of the queries is '
    'off) whenever a mask is given.'
)
PLACE = 'backward of the tiled attention autograd.Function, recomputation of the weights under a mask'


def grow(x, heads):
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


def visible(T, start, stop, S, mask, causal, device):
    """What the queries may see of the keys start .. stop - 1; None: all."""
    allowed = None if mask is None else mask[..., start:stop]
    if causal:
        rows = torch.arange(T, device=device)[:, None] + S - T
        past = rows >= torch.arange(start, stop, device=device)
        allowed = past if allowed is None else allowed & past
    return allowed


class TiledFunction(torch.autograd.Function):
    tile = 4

    @staticmethod
    def forward(ctx, q, k, v, mask, causal):
        T, S, scale = q.size(2), k.size(2), q.size(-1) ** -0.5
        scores = q @ k.transpose(-1, -2) * scale
        allowed = visible(T, 0, S, S, mask, causal, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        out = torch.exp(scores - lse) @ v
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, out, lse = ctx.saved_tensors
        T, S, scale = q.size(2), k.size(2), q.size(-1) ** -0.5
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for a in range(0, S, TiledFunction.tile):
            b = min(a + TiledFunction.tile, S)
            scores = q @ k[:, :, a:b].transpose(-1, -2) * scale
            allowed = visible(T, a, b, S, mask, ctx.causal, q.device)
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            p = torch.exp(scores - lse)
            ds = p * (grad @ v[:, :, a:b].transpose(-1, -2) - delta) * scale
            dq += ds @ k[:, :, a:b]
            dk[:, :, a:b] = ds.transpose(-1, -2) @ q
            dv[:, :, a:b] = p.transpose(-1, -2) @ grad
        return dq, dk, dv, None, None


class TiledBackward(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        if attention_mask is not None:
            attention_mask = attention_mask[None, None] if attention_mask.dim() == 2 else attention_mask[:, None]
        with torch.autocast(q.device.type, enabled=False):
            return TiledFunction.apply(q, k, v, attention_mask, causal)


class TiledFunction2(torch.autograd.Function):
    tile = 4

    @staticmethod
    def forward(ctx, q, k, v, mask, causal):
        T, S, scale = q.size(2), k.size(2), q.size(-1) ** -0.5
        scores = q @ k.transpose(-1, -2) * scale
        allowed = visible(T, 0, S, S, mask, causal, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        out = torch.exp(scores - lse) @ v
        ctx.causal = causal
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, out, lse = ctx.saved_tensors
        T, S, scale = q.size(2), k.size(2), q.size(-1) ** -0.5
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for a in range(0, S, TiledFunction2.tile):
            b = min(a + TiledFunction2.tile, S)
            scores = q @ k[:, :, a:b].transpose(-1, -2) * scale
            allowed = visible(T, a, b, S, None, ctx.causal, q.device)
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            p = torch.exp(scores - lse)
            ds = p * (grad @ v[:, :, a:b].transpose(-1, -2) - delta) * scale
            dq += ds @ k[:, :, a:b]
            dk[:, :, a:b] = ds.transpose(-1, -2) @ q
            dv[:, :, a:b] = p.transpose(-1, -2) @ grad
        return dq, dk, dv, None, None


class TiledBackward2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        if attention_mask is not None:
            attention_mask = attention_mask[None, None] if attention_mask.dim() == 2 else attention_mask[:, None]
        with torch.autocast(q.device.type, enabled=False):
            return TiledFunction2.apply(q, k, v, attention_mask, causal)


right = Subject(
    kind="attention",
    build=lambda c: TiledBackward(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: TiledBackward2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "once_differentiable": True},
    mask_forms=("pairwise",),
)
