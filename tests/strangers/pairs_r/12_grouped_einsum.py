"""Grouped-query attention without copying keys: the query heads are folded to [group, repeat], einsum does the rest."""

import torch

from veriformer.properties import Subject


def visibility(q, k, attention_mask, causal):
    """[B, H, T, S] of booleans; the causal diagonal ends at the last key."""
    queries, keys = q.shape[-2], k.shape[-2]
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(keys - queries)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return allowed.expand(*q.shape[:-1], keys)


def fold(t, groups):
    """b (g r) ... -> b g r ..."""
    return t.unflatten(1, (groups, t.shape[1] // groups))


def unfold_heads(t):
    """b g r t e -> b (g r) t e"""
    return t.flatten(1, 2)


def unfold_heads_swapped(t):
    """b g r t e -> b (r g) t e"""
    return t.transpose(1, 2).flatten(1, 2)


def grouped(q, k, v, allowed, unfold):
    groups = k.shape[1]
    kept = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bgrtk,bgsk->bgrts", fold(q, groups).to(kept), k.to(kept)) * q.shape[-1] ** -0.5
    allowed = fold(allowed, groups)
    weights = scores.masked_fill(~allowed, torch.finfo(kept).min).softmax(-1).masked_fill(~allowed, 0.0)
    return unfold(torch.einsum("bgrts,bgse->bgrte", weights, v.to(kept))).to(q.dtype)


def kernel(unfold):
    def attend(model, q, k, v, attention_mask=None, causal=False):
        return grouped(q, k, v, visibility(q, k, attention_mask, causal), unfold)

    return Subject(
        kind="attention",
        name="grouped einsum",
        forward=attend,
        mask_forms=("pairwise",),
        declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
    )


right, wrong = kernel(unfold_heads), kernel(unfold_heads_swapped)
WHAT = "Query heads are folded as (group, repeat) and the output's heads are laid out as (repeat, group)."
CAUSE = (
    "The heads of the output come in another order than those of the queries: head g*R + r stands at r*G + g. "
    "With one key-value head, or as many as query heads, nothing is seen; between these, heads return one another's results."
)
