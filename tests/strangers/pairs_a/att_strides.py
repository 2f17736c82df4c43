import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The kernel addresses queries, keys and values as if they were contiguous [B, H, T, K] (as_strided '
    'without contiguous()), so for transposed or sliced inputs it reads the wrong elements.'
)
PLACE = 'memory layout (strides) of attention inputs'


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


def rows(x):
    """[B, H, T, K] as [B * H, T, K], addressed as a kernel does it."""
    B, H, T, K = x.shape
    x = x.contiguous()
    return torch.as_strided(x, (B * H, T, K), (T * K, K, 1), x.storage_offset())


class StridedAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        S = k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        scores = torch.bmm(rows(q), rows(k).transpose(1, 2)).unflatten(0, (B, H)) * K**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.bmm(weights.flatten(0, 1), rows(v)).unflatten(0, (B, H))


def rows2(x):
    """[B, H, T, K] as [B * H, T, K], addressed as a kernel does it."""
    B, H, T, K = x.shape
    return torch.as_strided(x, (B * H, T, K), (T * K, K, 1), x.storage_offset())


class StridedAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        B, H, T, K = q.shape
        S = k.size(2)
        k, v = grow(k, H), grow(v, H)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        scores = torch.bmm(rows2(q), rows2(k).transpose(1, 2)).unflatten(0, (B, H)) * K**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.bmm(weights.flatten(0, 1), rows2(v)).unflatten(0, (B, H))


right = Subject(
    kind="attention",
    build=lambda c: StridedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: StridedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
