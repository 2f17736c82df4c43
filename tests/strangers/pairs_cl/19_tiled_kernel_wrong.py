"""Attention in tiles with an online softmax; causal tiles that lie wholly in the future are skipped."""

import torch

from veriformer.properties import Subject

TILE = 16


def attend(model, q, k, v, attention_mask=None, causal=False):
    B, H, T, K = q.shape
    S = k.shape[2]
    k, v = k.repeat_interleave(H // k.shape[1], 1), v.repeat_interleave(H // v.shape[1], 1)
    late = S - T  # the last query sees the last key
    q = q * K**-0.5
    if attention_mask is not None:
        attention_mask = attention_mask.expand(B, attention_mask.shape[1], T, S)
    rows = []
    for top in range(0, T, TILE):
        end = min(top + TILE, T)
        query = q[:, :, top:end]
        best = q.new_full((B, H, end - top, 1), torch.finfo(q.dtype).min)
        total = torch.zeros_like(best)
        acc = q.new_zeros(B, H, end - top, v.shape[-1])
        i = torch.arange(top, end, device=q.device)[:, None]
        for left in range(0, S, TILE):
            if causal and left > end - 1:
                break
            right = min(left + TILE, S)
            j = torch.arange(left, right, device=q.device)[None, :]
            seen = (j <= i + late)[None, None] if causal else torch.ones_like(i == j)[None, None]
            if attention_mask is not None:
                seen = seen & attention_mask[:, :, top:end, left:right]
            scores = query @ k[:, :, left:right].transpose(-1, -2)
            scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
            new = torch.maximum(best, scores.amax(-1, keepdim=True)).detach()
            p = (scores - new).exp() * seen
            keep = (best - new).exp()
            total = total * keep + p.sum(-1, keepdim=True)
            acc = acc * keep + p @ v[:, :, left:right]
            best = new
        rows.append(acc / total.masked_fill(total == 0, 1.0))
    return torch.cat(rows, 2)


subject = Subject(
    kind="attention",
    name="tiles",
    forward=attend,
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

WHAT = 'The test that skips future tiles forgets the offset S - T of the diagonal (line 27): with more keys than queries, and more than one tile of keys, visible tiles are left out.'
