WHAT = 'the test by which tiles wholly in the future are skipped forgets the offset S - T of the bottom-right diagonal (`if causal and k0 > q1 - 1`), so with more keys than queries visible tiles are left out'
import torch

from veriformer.properties import Subject

TILE = 16


def tiled_attention(q, k, v, mask=None, causal=False):
    """Online softmax over tiles of keys; the last query sees the last key."""
    B, H, T, K = q.shape
    S, E = k.shape[2], v.shape[3]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    if mask is not None:
        mask = mask.expand(B, 1, T, S) if mask.dim() == 4 else mask.expand(T, S)[None, None]
    shift = S - T
    rows = []
    for q0 in range(0, T, TILE):
        q1 = min(q0 + TILE, T)
        qi = q[:, :, q0:q1] * K**-0.5
        best = qi.new_full((B, H, q1 - q0, 1), -torch.inf)
        total = torch.zeros_like(best)
        acc = qi.new_zeros(B, H, q1 - q0, E)
        for k0 in range(0, S, TILE):
            if causal and k0 > q1 - 1:
                break
            k1 = min(k0 + TILE, S)
            s = qi @ k[:, :, k0:k1].mT
            if causal:
                i = torch.arange(q0, q1, device=q.device)[:, None] + shift
                j = torch.arange(k0, k1, device=q.device)
                s = s.masked_fill(j > i, -torch.inf)
            if mask is not None:
                s = s.masked_fill(~mask[:, :, q0:q1, k0:k1], -torch.inf)
            new = torch.maximum(best, s.amax(-1, keepdim=True))
            safe = new.masked_fill(new == -torch.inf, 0.0)
            p = (s - safe).exp()
            decay = (best - safe).exp()
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc * decay + p @ v[:, :, k0:k1]
            best = new
        rows.append(acc / total.masked_fill(total == 0, 1.0))
    return torch.cat(rows, dim=2)


subject = Subject(
    kind="attention",
    name="attention by tiles",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
