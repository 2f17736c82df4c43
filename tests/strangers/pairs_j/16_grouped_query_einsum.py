"""Grouped-query attention by einsum, as a function."""

import torch

from veriformer.properties import Subject

WHAT = "query heads are unfolded as (repeat, group) instead of (group, repeat): head h uses key-value head h mod G"
CAUSE = (
    "Query heads are dealt to the key-value heads in the wrong order: head h uses key-value head h mod G (tiled) "
    "instead of h // (H / G)."
)


def visible(q, k, attention_mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(S - T)
    if attention_mask is not None:
        seen = seen & attention_mask
    return seen if seen.ndim == 2 else seen[:, None, None]  # [B, 1, 1, T, S]


def weigh(scores, seen):
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~seen, 0)


def grouped(model, q, k, v, attention_mask=None, causal=False):
    groups, given = k.shape[1], q.dtype
    if given in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    q = q.unflatten(1, (groups, -1))
    scores = torch.einsum("bgrtk,bgsk->bgrts", q, k) * q.shape[-1] ** -0.5
    weights = weigh(scores, visible(q, k, attention_mask, causal))
    return torch.einsum("bgrts,bgse->bgrte", weights, v).flatten(1, 2).to(given)


def grouped_too(model, q, k, v, attention_mask=None, causal=False):
    groups, given = k.shape[1], q.dtype
    if given in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    q = q.unflatten(1, (-1, groups))
    scores = torch.einsum("brgtk,bgsk->brgts", q, k) * q.shape[-1] ** -0.5
    weights = weigh(scores, visible(q, k, attention_mask, causal))
    return torch.einsum("brgts,bgse->brgte", weights, v).flatten(1, 2).to(given)


def subject(function):
    return Subject(
        kind="attention",
        name="grouped queries",
        forward=function,
        mask_forms=("pairwise",),
        declares={"grouped_queries": True},
    )


right = subject(grouped)
wrong = subject(grouped_too)
