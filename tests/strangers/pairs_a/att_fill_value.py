import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Masked scores are filled with finfo.tiny (the smallest positive number, about 0) instead of '
    'finfo.min, so masked and future keys keep the weight of a score of 0.'
)
PLACE = 'fill value of masked attention scores'


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


class EagerAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5
        if mask is None:
            return torch.matmul(scores.softmax(-1), v)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return torch.matmul(weights, v)


class EagerAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = torch.matmul(q, k.transpose(2, 3)) * q.size(-1) ** -0.5
        if mask is None:
            return torch.matmul(scores.softmax(-1), v)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).tiny)
        weights = scores.softmax(-1)
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return torch.matmul(weights, v)


right = Subject(
    kind="attention",
    build=lambda c: EagerAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: EagerAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
