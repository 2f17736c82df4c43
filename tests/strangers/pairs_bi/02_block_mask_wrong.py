WHAT = 'A tile counts as full (and goes without the mask) as soon as any of its queries sees all of its keys, not only if all of them do: with a causal mask the last query of each diagonal tile sees the whole tile, so the other queries of the tile see the future (line 25: `.any(3)` for `.all(3)`).'
"""Attention by tiles with a block mask: empty tiles are skipped, full ones go without the mask (FlexAttention's idea)."""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from veriformer.properties import Subject

BLOCK = 8


class BlockMask(NamedTuple):
    tiles: torch.Tensor  # [B, 1, nq, BLOCK, nk, BLOCK]
    some: torch.Tensor  # [B, 1, nq, nk]
    full: torch.Tensor  # [B, 1, nq, nk]


def create_block_mask(allowed):
    b, h, t, s = allowed.shape
    allowed = F.pad(allowed, (0, -s % BLOCK, 0, -t % BLOCK), value=False)
    tiles = allowed.view(b, h, allowed.shape[2] // BLOCK, BLOCK, allowed.shape[3] // BLOCK, BLOCK)
    some = tiles.any(5).any(3)
    full = tiles.all(5).any(3)
    return BlockMask(tiles, some, full)


def attend(model, q, k, v, attention_mask=None, causal=False):
    t, s = q.shape[2], k.shape[2]
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    allowed = torch.ones(q.shape[0], 1, t, s, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed.tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask
    mask = create_block_mask(allowed)
    q = F.pad(q, (0, 0, 0, -t % BLOCK)) / math.sqrt(q.shape[-1])
    k, v = F.pad(k, (0, 0, 0, -s % BLOCK)), F.pad(v, (0, 0, 0, -s % BLOCK))

    rows = []
    for i in range(q.shape[2] // BLOCK):
        qi = q[:, :, i * BLOCK : (i + 1) * BLOCK]
        best = qi.new_full((*qi.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(best)
        acc = qi.new_zeros(*qi.shape[:-1], v.shape[-1])
        for j in range(k.shape[2] // BLOCK):
            if not mask.some[:, :, i, j].any():
                continue
            kj, vj = k[:, :, j * BLOCK : (j + 1) * BLOCK], v[:, :, j * BLOCK : (j + 1) * BLOCK]
            scores = qi @ kj.transpose(-1, -2)
            if not mask.full[:, :, i, j].all():
                seen = mask.tiles[:, :, i, :, j] | mask.full[:, :, i, j, None, None]
                scores = scores.masked_fill(~seen, -torch.inf)
            new = torch.maximum(best, scores.detach().amax(-1, keepdim=True))
            base = torch.where(new.isinf(), torch.zeros_like(new), new)
            fade, p = (best - base).exp(), (scores - base).exp()
            total, acc, best = total * fade + p.sum(-1, keepdim=True), acc * fade + p @ vj, new
        rows.append(acc / torch.where(total == 0, torch.ones_like(total), total))
    return torch.cat(rows, 2)[:, :, :t]


subject = Subject(
    kind="attention",
    name="attention with a block mask",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)
