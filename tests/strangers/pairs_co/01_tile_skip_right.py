"""Attention forward in tiles with an online softmax; tiles of keys that a causal tile of queries cannot see are skipped."""
import math

import torch

from veriformer.properties import Subject

ROWS, COLS = 16, 16


def flash(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    given = q.dtype
    q = q.to(wide) * (1.0 / math.sqrt(K))
    k, v = (t.to(wide).repeat_interleave(H // G, dim=1) for t in (k, v))
    if mask is not None:
        mask = mask.expand(B, H, T, S)
    shift = S - T  # the last query stands at the last key
    tiles = []
    for t0 in range(0, T, ROWS):
        q_tile = q[:, :, t0 : t0 + ROWS]
        t1 = t0 + q_tile.shape[2]
        best = q_tile.new_full((B, H, t1 - t0, 1), -math.inf)
        total = q_tile.new_zeros(B, H, t1 - t0, 1)
        out = q_tile.new_zeros(B, H, t1 - t0, v.shape[-1])
        last = min(S, t1 + shift) if causal else S
        for s0 in range(0, last, COLS):
            s1 = min(s0 + COLS, S)
            score = q_tile @ k[:, :, s0:s1].transpose(-1, -2)
            if causal:
                row = torch.arange(t0, t1, device=q.device)[:, None] + shift
                score = score.masked_fill(torch.arange(s0, s1, device=q.device) > row, -math.inf)
            if mask is not None:
                score = score.masked_fill(~mask[:, :, t0:t1, s0:s1], -math.inf)
            newer = torch.maximum(best, score.detach().amax(-1, keepdim=True))
            base = torch.where(newer == -math.inf, torch.zeros_like(newer), newer)
            p, fade = (score - base).exp(), (best - base).exp()
            total = total * fade + p.sum(-1, keepdim=True)
            out = out * fade + p @ v[:, :, s0:s1]
            best = newer
        tiles.append(out / torch.where(total == 0, torch.ones_like(total), total))
    return torch.cat(tiles, dim=2).to(given)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
