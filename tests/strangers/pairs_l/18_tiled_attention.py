"""Attention by tiles of keys with a running maximum, as in FlashAttention's algorithm 1."""

import math

import torch

from veriformer.properties import Subject

TILE = 16


def tiled(merge):
    def attend(model, q, k, v, attention_mask=None, causal=False):
        T, S = q.shape[-2], k.shape[-2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril()
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask)
        q = q / math.sqrt(q.shape[-1])
        top = q.new_full((*q.shape[:-1], 1), -math.inf)
        norm = torch.zeros_like(top)
        acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for a in range(0, S, TILE):
            s = (q @ k[..., a : a + TILE, :].transpose(-1, -2)).masked_fill(~allowed[..., a : a + TILE], -math.inf)
            best = torch.maximum(top, s.amax(-1, keepdim=True))
            safe = best.masked_fill(best == -math.inf, 0.0)
            p, old = (s - safe).exp(), (top - safe).exp()
            norm = norm * old + p.sum(-1, keepdim=True)
            acc = merge(acc, old, p @ v[..., a : a + TILE, :])
            top = best
        return acc / norm.masked_fill(norm == 0, 1.0)

    return attend


def subject(merge):
    return Subject(
        kind="attention",
        name="tiled",
        forward=tiled(merge),
        mask_forms=("pairwise",),
        declares={"empty_row": "zeros", "causal_alignment": "top-left"},
    )


right = subject(lambda acc, old, new: acc * old + new)
wrong = subject(lambda acc, old, new: acc + new)
WHAT = "the running sum of values is not rescaled when a later tile raises the maximum (the denominator is)"
CAUSE = (
    "Over more than one tile of 16 keys, the accumulated values are not multiplied by exp(old max - new max) when the running "
    "maximum grows: earlier tiles weigh too much, and the weights no longer sum to 1."
)
