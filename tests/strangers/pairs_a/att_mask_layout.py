import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "The mask's orientation is guessed from its shape: if it fits [S, T] it is transposed, which for T == "
    'S happens always, so a pairwise mask that is not symmetric is applied the wrong way round.'
)
PLACE = 'handling of a pairwise attention mask when there are as many queries as keys'


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


class TolerantAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        T, S = q.size(2), k.size(2)
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, T, S, q.device)
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.matmul(weights, v)


class TolerantAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        T, S = q.size(2), k.size(2)
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        if attention_mask is not None and attention_mask.shape[-2:] == (S, T):
            attention_mask = attention_mask.transpose(-1, -2)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return torch.matmul(weights, v)


right = Subject(
    kind="attention",
    build=lambda c: TolerantAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: TolerantAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
