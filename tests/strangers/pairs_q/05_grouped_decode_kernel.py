"""Grouped-query attention as a function, with a path of its own for the single query of a decoding step."""

import torch

from veriformer.properties import Subject

WHAT = "The path for a single query splits the query heads as (repeat, group) where the general path has (group, repeat)."
CAUSE = (
    "Where T = 1, heads are viewed as [repeat, groups], so query head h reads key-value head h mod G in place of h // (H / G). "
    "Longer queries, full heads and one shared key-value head are right."
)


def safe_softmax(scores, hidden):
    """Rows of which everything is hidden give zeros."""
    scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top.isinf(), 0.0).detach()).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def prefill(q, k, v, hidden):
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return safe_softmax(scores, hidden) @ v


def decode(q, k, v, hidden):
    """One query a head: the queries of a group become the rows of one product, keys are read once."""
    B, H, _, K = q.shape
    G = k.shape[1]
    rows = q.reshape(B, G, H // G, K)
    scores = rows @ k.transpose(-1, -2) * K**-0.5
    out = safe_softmax(scores, hidden) @ v
    return out.reshape(B, H, 1, v.shape[-1])


def decode_strided(q, k, v, hidden):
    """One query a head: the queries of a group become the rows of one product, keys are read once."""
    B, H, _, K = q.shape
    G = k.shape[1]
    rows = q.reshape(B, H // G, G, K).transpose(1, 2)
    scores = rows @ k.transpose(-1, -2) * K**-0.5
    out = safe_softmax(scores, hidden) @ v
    return out.transpose(1, 2).reshape(B, H, 1, v.shape[-1])


def attend(step):
    def forward(model, q, k, v, attention_mask=None, causal=False):
        T, S = q.shape[-2], k.shape[-2]
        hidden = torch.zeros(T, S, dtype=torch.bool, device=q.device)
        if causal:
            hidden = ~torch.ones_like(hidden).tril(S - T)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask  # [B, 1, T, S]
        return (step if T == 1 else prefill)(q, k, v, hidden)

    return forward


FACTS = {"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"}
right = Subject(kind="attention", name="grouped kernel", forward=attend(decode), mask_forms=("pairwise",), declares=FACTS)
wrong = Subject(
    kind="attention", name="grouped kernel", forward=attend(decode_strided), mask_forms=("pairwise",), declares=FACTS
)
