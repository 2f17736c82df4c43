"""An attention kernel with a backward of its own: blocks of keys, an online softmax, weights computed again."""

import math

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

BLOCK = 4


class BlockedAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, allowed):
        scale = 1 / math.sqrt(q.shape[-1])
        kept = torch.promote_types(q.dtype, torch.float32)  # sums in half precision would stop growing at some length
        best = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=kept, device=q.device)
        total, output = (
            torch.zeros_like(best),
            torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=kept, device=q.device),
        )
        for start in range(0, k.shape[-2], BLOCK):
            block = slice(start, start + BLOCK)
            scores = (q @ k[..., block, :].transpose(-1, -2) * scale).to(kept)
            scores = scores.masked_fill(~allowed[..., block], -torch.inf)
            new = torch.maximum(best, scores.amax(-1, keepdim=True))
            shift = torch.where(new.isinf(), torch.zeros_like(new), new)
            weights, keep = (scores - shift).exp(), (best - shift).exp()
            total = total * keep + weights.sum(-1, keepdim=True)
            output = output * keep + weights @ v[..., block, :].to(kept)
            best = new
        total = torch.where(total == 0, torch.ones_like(total), total)
        shift = torch.where(best.isinf(), torch.zeros_like(best), best)
        ctx.save_for_backward(q, k, v, allowed, shift, total)
        return (output / total).to(q.dtype)

    @staticmethod
    @once_differentiable  # without it the second gradient would be wrong in silence: the sums are saved, not derived
    def backward(ctx, gradient):
        q, k, v, allowed, shift, total = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
        weights = ((scores - shift).exp() / total).to(q.dtype)
        inner = gradient @ v.transpose(-1, -2)
        wrong = weights * (inner - (weights * inner).sum(-1, keepdim=True)) * scale
        return wrong @ k, wrong.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient, None


def attend(model, q, k, v, attention_mask=None, causal=False):
    """Call the kernel: q `[B, H, T, K]`, k and v `[B, H, S, *]`, attention_mask True = may attend."""
    queries, keys = q.shape[-2], k.shape[-2]
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return BlockedAttention.apply(q, k, v, allowed.expand(*q.shape[:-1], keys))


kernel = Subject(
    kind="attention",
    name="blocked attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left"},
)
