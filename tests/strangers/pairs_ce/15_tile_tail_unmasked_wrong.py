WHAT = "Tiled attention pads the keys to a multiple of the tile with zeros; on the fast path without mask and causality the tail is not masked (allowed = None), so the padded keys with score 0 enter the softmax's denominator."
import math

import torch
from torch.nn import functional as F

from veriformer.properties import Subject

TILE = 16


def tiled_attention(q, k, v, attention_mask=None, causal=False):
    """Online softmax over tiles of keys, queries whole."""
    (B, H, T, K), S = q.shape, k.shape[2]
    k, v = (a.repeat_interleave(H // a.shape[1], 1) for a in (k, v))
    tail = -S % TILE
    allowed = None
    if attention_mask is not None or causal:
        allowed = torch.ones(T, S, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask
        allowed = F.pad(allowed.expand(B, H, T, S), (0, tail))
    k, v = F.pad(k, (0, 0, 0, tail)), F.pad(v, (0, 0, 0, tail))
    q = q / math.sqrt(K)
    best = q.new_full((B, H, T, 1), -math.inf)
    total, acc = torch.zeros_like(best), q.new_zeros(B, H, T, v.shape[-1])
    for start in range(0, S + tail, TILE):
        tile = slice(start, start + TILE)
        scores = q @ k[:, :, tile].mT
        if allowed is not None:
            scores = scores.masked_fill(~allowed[..., tile], -math.inf)
        new = torch.maximum(best, scores.amax(-1, keepdim=True)).detach()
        safe = torch.where(new.isinf(), 0.0, new)
        shrink, p = (best - safe).exp(), (scores - safe).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + p @ v[:, :, tile]
        best = new
    return acc / torch.where(total == 0, 1.0, total)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda m, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)
