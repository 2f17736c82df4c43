"""Flash-decoding: the keys are split, every split gives an output and its statistics, and these are merged."""

import math

import torch

from veriformer.properties import Subject

SPLIT = 16


def split_kv_attention(q, k, v, allowed, scale):
    """q [B,H,T,K], k and v [B,H,S,*], allowed broadcastable to [B,H,T,S]."""
    outs, stats = [], []
    for start in range(0, k.shape[-2], SPLIT):
        keys, values = k[..., start : start + SPLIT, :], v[..., start : start + SPLIT, :]
        scores = torch.einsum("bhtd,bhsd->bhts", q, keys) * scale
        scores = scores.masked_fill(~allowed[..., start : start + SPLIT], -torch.inf)
        top = scores.detach().amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        p = torch.exp(scores - top)
        norm = p.sum(-1, keepdim=True)
        empty = norm == 0
        safe = torch.where(empty, torch.ones_like(norm), norm)
        outs.append(torch.einsum("bhts,bhse->bhte", p, values) / safe)
        lse = top + torch.log(safe)
        stats.append(torch.where(empty, torch.full_like(lse, -torch.inf), lse))
    outs, stats = torch.stack(outs), torch.stack(stats)
    best = stats.detach().amax(0, keepdim=True)
    best = torch.where(best == -torch.inf, torch.zeros_like(best), best)
    share = torch.exp(stats - best)
    total = share.sum(0)
    return (share * outs).sum(0) / torch.where(total == 0, torch.ones_like(total), total)


def attend(model, q, k, v, attention_mask=None, causal=False):
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    queries, keys = q.shape[-2], k.shape[-2]
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril(keys - queries)
    if attention_mask is not None:
        allowed = allowed & attention_mask
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    out = split_kv_attention(q.to(wide), k.to(wide), v.to(wide), allowed, 1.0 / math.sqrt(q.shape[-1]))
    return out.to(q.dtype)


subject = Subject(
    kind="attention",
    name="split-KV attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
