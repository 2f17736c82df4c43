import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "When no gradient is recorded the query is scaled in place (mul_), which damages the caller's tensor: "
    'a second call with the same query gives another result.'
)
PLACE = 'scaling of the query in attention, no-grad path'


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


class LeanAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        scale = 1.0 / math.sqrt(q.size(-1))
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        q = q * scale
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, -1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return weights @ v


class LeanAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        scale = 1.0 / math.sqrt(q.size(-1))
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        q = q * scale if torch.is_grad_enabled() else q.mul_(scale)
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, -1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return weights @ v


right = Subject(
    kind="attention",
    build=lambda c: LeanAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: LeanAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
