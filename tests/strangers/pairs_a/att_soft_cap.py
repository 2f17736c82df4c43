import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The soft cap is applied after the mask: tanh turns the masked fill value into -5, so masked and '
    'future keys keep a weight instead of none.'
)
PLACE = 'order of soft cap and mask on attention scores'


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


class CappedAttention(nn.Module):
    cap = 5.0

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        scores = self.cap * torch.tanh(scores / self.cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return weights @ v


class CappedAttention2(nn.Module):
    cap = 5.0

    def forward(self, q, k, v, attention_mask=None, causal=False):
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        scores = self.cap * torch.tanh(scores / self.cap)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return weights @ v


right = Subject(
    kind="attention",
    build=lambda c: CappedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "soft_cap": 5.0},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: CappedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "soft_cap": 5.0},
    mask_forms=("pairwise",),
)
