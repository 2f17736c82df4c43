WHAT = "The causal skip of key tiles forgets the shift S - T that the mask itself has: with more keys than queries (bottom-right alignment) whole tiles that are visible are never read (line 34: `end_n = min(S, stop_m) if causal else S`)."
"""Attention by tiles with an online softmax, in plain torch: the model of our Triton kernel."""

import math

import torch

from veriformer.properties import Subject

BLOCK_M = 16
BLOCK_N = 16


def tiled_attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    groups = H // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    if mask is not None:
        mask = mask.expand(B, mask.shape[1], T, S)
    scale = 1.0 / math.sqrt(K)
    shift = S - T  # the last query stands at the last key
    tiles = []
    for start_m in range(0, T, BLOCK_M):
        stop_m = min(start_m + BLOCK_M, T)
        q_tile = q[:, :, start_m:stop_m] * scale
        rows = torch.arange(start_m, stop_m, device=q.device)[:, None]
        best = q.new_full((B, H, stop_m - start_m, 1), -math.inf)
        total = q.new_zeros((B, H, stop_m - start_m, 1))
        acc = q.new_zeros((B, H, stop_m - start_m, v.shape[-1]))
        # tiles right of the diagonal are skipped
        end_n = min(S, stop_m) if causal else S
        for start_n in range(0, end_n, BLOCK_N):
            stop_n = min(start_n + BLOCK_N, S)
            scores = q_tile @ k[:, :, start_n:stop_n].transpose(-1, -2)
            if causal:
                cols = torch.arange(start_n, stop_n, device=q.device)
                scores = scores.masked_fill(cols > rows + shift, -math.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, :, start_m:stop_m, start_n:stop_n], -math.inf)
            new_best = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            safe = torch.where(new_best == -math.inf, torch.zeros_like(new_best), new_best)
            alpha = torch.exp(best - safe)
            p = torch.exp(scores - safe)
            total = total * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, start_n:stop_n]
            best = new_best
        tiles.append(acc / torch.where(total == 0, torch.ones_like(total), total))
    return torch.cat(tiles, dim=2)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
