"""Attention in tiles of queries and keys with a running maximum (FlashAttention's recurrence), plain torch.

The causal diagonal is aligned with the bottom right corner, a query that sees nothing gives zeros.
"""
import torch
from veriformer.properties import Subject

TILE = 16


def tiled(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    k = k.repeat_interleave(H // G, dim=1)
    v = v.repeat_interleave(H // G, dim=1)
    if mask is not None:
        mask = mask.expand(B, mask.shape[1] if mask.dim() == 4 else 1, T, S)
    out = []
    for q0 in range(0, T, TILE):
        q1 = min(q0 + TILE, T)
        rows = torch.arange(q0, q1, device=q.device)[:, None]
        acc = q.new_zeros(B, H, q1 - q0, v.shape[-1])
        best = q.new_full((B, H, q1 - q0, 1), -torch.inf)
        total = q.new_zeros(B, H, q1 - q0, 1)
        # keys behind the last query of the tile are never seen: do not visit their tiles
        end = min(S, q1) if causal else S
        for k0 in range(0, end, TILE):
            k1 = min(k0 + TILE, S)
            s = q[:, :, q0:q1] @ k[:, :, k0:k1].transpose(-1, -2) * K**-0.5
            if causal:
                cols = torch.arange(k0, k1, device=q.device)[None]
                s = s.masked_fill(cols > rows + S - T, -torch.inf)
            if mask is not None:
                s = s.masked_fill(~mask[:, :, q0:q1, k0:k1], -torch.inf)
            new = torch.maximum(best, s.amax(-1, keepdim=True))
            safe = torch.where(new.isinf(), 0.0, new)
            p = (s - safe).exp()
            fade = (best - safe).exp()
            total = total * fade + p.sum(-1, keepdim=True)
            acc = acc * fade + p @ v[:, :, k0:k1]
            best = new
        out.append(acc / torch.where(total == 0, 1.0, total))
    return torch.cat(out, dim=2)


subject = Subject(
    kind="attention",
    forward=lambda m, q, k, v, attention_mask=None, causal=False: tiled(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)

WHAT = 'Line 26: the bound that skips tiles in the future forgets the offset S - T of the bottom-right diagonal, so that with fewer queries than keys visible tiles of keys are skipped.'
