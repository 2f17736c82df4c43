"""Grouped-query attention without repeated keys: the queries of a group are folded into the time axis (einops)."""

import torch
from einops import einsum, rearrange, repeat

from veriformer.properties import Subject

WHAT = "The mask is spread over the folded axis as (time, head of the group), the queries as (head of the group, time)."
CAUSE = (
    "For grouped heads the queries are laid out '(r t)' and the mask '(t r)': wherever a key-value head serves several "
    "query heads, row n of the scores gets the mask of another query, causal or pairwise."
)


def whole_mask(attention_mask, causal, batch, queries, keys, device):
    """`[B, 1, T, S]`, True = may attend; the last query stands beside the last key."""
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(keys - queries)
    if attention_mask is not None:
        given = attention_mask.bool()
        if given.ndim == 3:
            given = rearrange(given, "b t s -> b 1 t s")
        mask = mask & given
    return mask


def spread_head_major(mask, groups_of):
    return repeat(mask, "b 1 t s -> b 1 (r t) s", r=groups_of)


def spread_time_major(mask, groups_of):
    return repeat(mask, "b 1 t s -> b 1 (t r) s", r=groups_of)


class FoldedAttention:
    """softmax(q k^T / sqrt(d)) v for H query heads over G key-value heads, one product for each key-value head."""

    def __init__(self, spread):
        self.spread = spread

    def __call__(self, q, k, v, attention_mask=None, causal=False):
        batch, heads, queries, width = q.shape
        groups_of = heads // k.shape[1]
        kept = torch.promote_types(q.dtype, torch.float32)
        mask = whole_mask(attention_mask, causal, batch, queries, k.shape[2], q.device)
        mask = self.spread(mask, groups_of)

        folded = rearrange(q.to(kept), "b (g r) t d -> b g (r t) d", r=groups_of)
        scores = einsum(folded, k.to(kept), "b g n d, b g s d -> b g n s") * width**-0.5
        scores = scores.masked_fill(~mask, torch.finfo(kept).min)
        weights = scores.softmax(dim=-1) * mask  # a row without keys gives zeros
        out = einsum(weights, v.to(kept), "b g n s, b g s e -> b g n e")
        return rearrange(out, "b g (r t) e -> b (g r) t e", r=groups_of).to(q.dtype)


def kernel(spread):
    attention = FoldedAttention(spread)

    def forward(model, q, k, v, attention_mask=None, causal=False):
        return attention(q, k, v, attention_mask, causal)

    return Subject(
        kind="attention",
        name="folded grouped attention",
        forward=forward,
        mask_forms=("pairwise",),
        declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
    )


right = kernel(spread_head_major)
wrong = kernel(spread_time_major)
