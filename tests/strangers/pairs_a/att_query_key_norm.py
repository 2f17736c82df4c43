import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "Keys are normalised with F.normalize's default axis (dim=1, the heads) instead of the channels, so "
    'key norms of a head depend on the other heads and scores are not cosines.'
)
PLACE = 'normalisation of the keys in query-key-normalised attention'


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


class CosineAttention(nn.Module):
    """Scores are 10 times the cosine of query and key."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        q = F.normalize(q, dim=-1)
        k = F.normalize(k, dim=-1)
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = 10.0 * (q @ k.transpose(-1, -2))
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return weights @ v


class CosineAttention2(nn.Module):
    """Scores are 10 times the cosine of query and key."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        q = F.normalize(q, dim=-1)
        k = F.normalize(k)
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = 10.0 * (q @ k.transpose(-1, -2))
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return weights @ v


right = Subject(
    kind="attention",
    build=lambda c: CosineAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "query_key_norm": True, "attention_scale": 10.0},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: CosineAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "query_key_norm": True, "attention_scale": 10.0},
    mask_forms=("pairwise",),
)
