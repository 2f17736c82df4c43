import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The scale is taken from the width of the values, 1/sqrt(v.size(-1)), instead of that of the keys, so '
    'scores are scaled wrongly whenever values are wider or narrower than keys.'
)
PLACE = 'softmax scale of attention with values of another width'


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


class WideAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        d_head = k.size(-1)
        scores = torch.einsum("...td,...sd->...ts", q / math.sqrt(d_head), k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.einsum("...ts,...se->...te", weights, v)


class WideAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        d_head = v.size(-1)
        scores = torch.einsum("...td,...sd->...ts", q / math.sqrt(d_head), k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.einsum("...ts,...se->...te", weights, v)


right = Subject(
    kind="attention",
    build=lambda c: WideAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: WideAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
