import math

import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Keys are expanded to the query heads with repeat_interleave but values with repeat (tiling), so with '
    'more than one group the weights of a query head are applied to the values of another group.'
)
PLACE = 'expansion of the value heads in grouped-query attention'


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


class GroupedAttention(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        rep = q.size(1) // k.size(1)
        k = torch.repeat_interleave(k, rep, dim=1)
        v = torch.repeat_interleave(v, rep, dim=1)
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.size(-1))
        if mask is None:
            return torch.einsum("bhts,bhse->bhte", scores.softmax(-1), v)
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        return torch.einsum("bhts,bhse->bhte", weights, v)


class GroupedAttention2(nn.Module):
    def forward(self, q, k, v, attention_mask=None, causal=False):
        rep = q.size(1) // k.size(1)
        k = torch.repeat_interleave(k, rep, dim=1)
        v = v.repeat(1, rep, 1, 1)
        mask = full_mask(attention_mask, causal, q.size(2), k.size(2), q.device)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.size(-1))
        if mask is None:
            return torch.einsum("bhts,bhse->bhte", scores.softmax(-1), v)
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        return torch.einsum("bhts,bhse->bhte", weights, v)


right = Subject(
    kind="attention",
    build=lambda c: GroupedAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
    domain={"num_heads": [4, 8], "num_key_value_heads": [2]},
)

wrong = Subject(
    kind="attention",
    build=lambda c: GroupedAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
    domain={"num_heads": [4, 8], "num_key_value_heads": [2]},
)
