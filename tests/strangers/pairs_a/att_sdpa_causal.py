import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Without an attention_mask the causal case is handed to scaled_dot_product_attention(is_causal=True) '
    'even if T != S, which aligns the mask at the top left, where the contract (and the masked path) is '
    'bottom-right.'
)
PLACE = 'causal alignment of attention with fewer queries than keys, path without a mask'


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


class SdpaAttention(nn.Module):
    """Dispatches to the fused kernel; a mask is built only where one is needed."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        T, S = q.size(2), k.size(2)
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        if causal and attention_mask is None and T == S:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SdpaAttention2(nn.Module):
    """Dispatches to the fused kernel; a mask is built only where one is needed."""

    def forward(self, q, k, v, attention_mask=None, causal=False):
        T, S = q.size(2), k.size(2)
        k, v = grow(k, q.size(1)), grow(v, q.size(1))
        if causal and attention_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = full_mask(attention_mask, causal, T, S, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


right = Subject(
    kind="attention",
    build=lambda c: SdpaAttention(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)

wrong = Subject(
    kind="attention",
    build=lambda c: SdpaAttention2(),
    forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
    declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    mask_forms=("pairwise",),
)
