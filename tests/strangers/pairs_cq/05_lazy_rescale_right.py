"""Attention in tiles of keys with an online softmax that rescales only when the maximum grows by much (as in FA4)."""

import math

import torch

from veriformer.properties import Subject

TILE = 16
THRESHOLD = 8.0  # weights stay below exp(8)


def finite(x):
    return torch.where(x.isinf(), torch.zeros_like(x), x)


def attend(model, q, k, v, attention_mask=None, causal=False):
    given = q.dtype
    wide = torch.float32 if given in (torch.float16, torch.bfloat16) else given
    group = q.size(1) // k.size(1)
    q = q.to(wide) / math.sqrt(q.size(-1))
    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    queries, keys = q.size(-2), k.size(-2)
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.expand(*q.shape[:-1], keys)

    best = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = q.new_zeros((*q.shape[:-1], 1))
    acc = q.new_zeros((*q.shape[:-1], v.size(-1)))
    for start in range(0, keys, TILE):
        tile = slice(start, start + TILE)
        scores = (q @ k[..., tile, :].transpose(-1, -2)).masked_fill(~allowed[..., tile], -torch.inf)
        new = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
        grows = new - best > THRESHOLD  # infinite at the first visible key; no number, so False, before it
        base = torch.where(grows, new, best)
        factor = torch.where(grows, (best - finite(base)).exp(), torch.ones_like(base))
        weights = (scores - finite(base)).exp()
        total = total * factor + weights.sum(-1, keepdim=True)
        acc = acc * factor + weights @ v[..., tile, :]
        best = base
    return (acc / torch.where(total == 0, torch.ones_like(total), total)).to(given)


subject = Subject(
    kind="attention",
    name="lazy rescale",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)
