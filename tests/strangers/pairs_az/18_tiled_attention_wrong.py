WHAT = "the bound of the tiles to visit forgets the shift S - T of the diagonal: with more keys than queries visible tiles are skipped (line 27)."
"""Attention by tiles with an online softmax; tiles beyond the causal diagonal are not visited."""

import math

import torch

from veriformer.properties import Subject

TILE_Q, TILE_K = 16, 16


def flash(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    G, S, E = k.shape[1], k.shape[2], v.shape[3]
    if G != H:
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    scale = 1.0 / math.sqrt(K)
    shift = S - T  # the last query sees the last key
    tiles = []
    for q0 in range(0, T, TILE_Q):
        q1 = min(q0 + TILE_Q, T)
        rows = torch.arange(q0, q1, device=q.device)
        acc = q.new_zeros(B, H, q1 - q0, E)
        total = q.new_zeros(B, H, q1 - q0, 1)
        best = q.new_full((B, H, q1 - q0, 1), -math.inf)
        stop = min(S, q1) if causal else S
        for k0 in range(0, stop, TILE_K):
            k1 = min(k0 + TILE_K, S)
            s = q[:, :, q0:q1] @ k[:, :, k0:k1].transpose(-2, -1) * scale
            if causal:
                cols = torch.arange(k0, k1, device=q.device)
                s = s.masked_fill(cols[None, :] > rows[:, None] + shift, -math.inf)
            if mask is not None:
                s = s.masked_fill(~mask[..., q0:q1, k0:k1], -math.inf)
            new_best = torch.maximum(best, s.amax(-1, keepdim=True))
            safe = torch.where(new_best.isinf(), torch.zeros_like(new_best), new_best)
            p = torch.exp(s - safe)
            keep = torch.exp(best - safe)
            acc = acc * keep + p @ v[:, :, k0:k1]
            total = total * keep + p.sum(-1, keepdim=True)
            best = new_best
        tiles.append(acc / torch.where(total == 0, torch.ones_like(total), total))
    return torch.cat(tiles, dim=2)


def forward(model, q, k, v, attention_mask=None, causal=False):
    if attention_mask is not None:
        attention_mask = attention_mask.expand(*attention_mask.shape[:-2], q.shape[2], k.shape[2])
    return flash(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="tiles",
    forward=forward,
    mask_forms=("pairwise",),
    declares={"causal_alignment": "bottom-right", "empty_row": "zeros"},
)
