import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Keys are taken to be transposed already if their second to last size equals d_head, so exactly when '
    'S == d_head the score is computed with the transposed key matrix.'
)
PLACE = 'key layout in the score product, when the number of keys equals the head width'


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


class LayoutAttention(nn.Module):
    """Caches may hand over keys as [B, H, K, S]; those are not transposed again."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        H, T, K = q.shape[1:]
        S = v.size(2)
        k, v = grow(k, H), grow(v, H)
        stored_transposed = k.shape[-2:] == (K, S) and K != S
        kt = k if stored_transposed else k.transpose(-1, -2)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        scores = (q @ kt) * K**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return weights @ v


class LayoutAttention2(nn.Module):
    """Caches may hand over keys as [B, H, K, S]; those are not transposed again."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        H, T, K = q.shape[1:]
        S = v.size(2)
        k, v = grow(k, H), grow(v, H)
        stored_transposed = k.size(-2) == K
        kt = k if stored_transposed else k.transpose(-1, -2)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        scores = (q @ kt) * K**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return weights @ v


right = Subject(
    kind="attention",
    build=lambda c: LayoutAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: LayoutAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
