WHAT = "A split without visible keys reports 0 as the logarithm of its sum, not minus infinity, and so dilutes the output of the other splits by a weight exp(0) (line 31)."

"""Attention over split keys, as in flash decoding: every split gives its own softmax, and their sums are joined."""

import torch

from veriformer.properties import Subject

SPLIT = 16


def visible(q, k, attention_mask, causal):
    """Which keys each query sees, [..., T, S]; the last query is at the last key."""
    T, S = q.shape[-2], k.shape[-2]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(S - T)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    return allowed.expand(*q.shape[:2], T, S)


def one_split(q, k, v, allowed, scale):
    """What the keys of one split give, [B, H, T, E], and the logarithm of their sum, [B, H, T, 1]."""
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    some = allowed.any(dim=-1, keepdim=True)
    best = torch.where(some, scores.amax(dim=-1, keepdim=True), 0.0).detach()
    weights = torch.exp(scores - best)
    total = weights.sum(dim=-1, keepdim=True)
    total = torch.where(some, total, 1.0)
    lse = torch.where(some, best + total.log(), 0.0)
    return weights @ v / total, lse


def join(outputs, sums):
    """Means of the splits, weighted by their sums; a split without keys has no weight."""
    sums = torch.stack(sums)
    best = sums.amax(dim=0).detach()
    best = torch.where(best == -torch.inf, 0.0, best)
    shares = torch.exp(sums - best)
    total = shares.sum(dim=0)
    total = torch.where(total == 0, 1.0, total)
    return (shares * torch.stack(outputs)).sum(dim=0) / total


def attend(model, q, k, v, attention_mask=None, causal=False):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    allowed = visible(q, k, attention_mask, causal)
    outputs, sums = [], []
    for begin in range(0, k.shape[-2], SPLIT):
        part = slice(begin, begin + SPLIT)
        y, lse = one_split(q, k[..., part, :], v[..., part, :], allowed[..., part], q.shape[-1] ** -0.5)
        outputs.append(y)
        sums.append(lse)
    return join(outputs, sums)


subject = Subject(
    kind="attention",
    name="split keys",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
