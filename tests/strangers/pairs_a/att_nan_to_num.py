import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Rows that may attend to nothing are softmaxed over an additive mask of -inf alone and repaired with '
    'nan_to_num: the output is zeros as promised, but the backward of the softmax still carries NaN into '
    'the gradients of queries and keys.'
)
PLACE = 'gradient of attention for a query whose row is wholly masked'


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


class GuardedAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is None:
            return scores.softmax(-1) @ v
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights * mask
        return weights @ v


class GuardedAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is None:
            return scores.softmax(-1) @ v
        bias = torch.zeros(mask.shape, dtype=scores.dtype, device=q.device).masked_fill(~mask, -math.inf)
        weights = torch.nan_to_num((scores + bias).softmax(-1), nan=0.0)
        return weights @ v


right = Subject(
    kind="attention",
    build=lambda c: GuardedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: GuardedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
