WHAT = "splits are merged with e^(lse - top) although the log-sum-exps are in base 2, so that splits are weighted wrongly as soon as there are two (line 30)."
"""Flash-decoding: keys in splits, each with its own softmax in base 2, merged by their log-sum-exp."""
import math

import torch

from veriformer.properties import Subject

SPLIT = 8
LOG2E = 1.4426950408889634


def partial(q, k, v, allowed):
    s = torch.einsum("bhtk,bhsk->bhts", q, k) * (LOG2E / math.sqrt(q.shape[-1]))
    s = s.masked_fill(~allowed, -math.inf)
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == -math.inf, torch.zeros_like(m), m)
    p = torch.exp2(s - m)
    l = p.sum(-1, keepdim=True)
    seen = l > 0
    safe = torch.where(seen, l, torch.ones_like(l))
    lse = torch.where(seen, m + torch.log2(safe), torch.full_like(l, -math.inf))
    return torch.einsum("bhts,bhse->bhte", p / safe, v), lse


def merge(outs, lses):
    """[n, B, H, T, E], [n, B, H, T, 1] -> [B, H, T, E]"""
    top = lses.detach().amax(0, keepdim=True)
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    w = torch.exp(lses - top)
    total = w.sum(0)
    total = torch.where(total > 0, total, torch.ones_like(total))
    return (w * outs).sum(0) / total


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, _ = q.shape
    G, S = k.shape[1:3]
    k = k[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    v = v[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    allowed = allowed.broadcast_to(B, H, T, S)
    parts = [
        partial(q, ks, vs, seen)
        for ks, vs, seen in zip(k.split(SPLIT, 2), v.split(SPLIT, 2), allowed.split(SPLIT, 3))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts))
    return merge(outs, lses)


subject = Subject(
    kind="attention",
    name="split-KV attention",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)
