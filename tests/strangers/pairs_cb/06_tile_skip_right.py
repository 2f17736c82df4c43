"""Flash attention in plain torch: tiles, running maximum, running sum."""
import torch

from veriformer.properties import Subject

BQ, BK = 8, 8


def flash(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    G, S, E = k.shape[1], k.shape[2], v.shape[3]
    k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
    if mask is not None:
        mask = mask.expand(B, H, T, S)
    acc = torch.promote_types(q.dtype, torch.float32)
    offset = S - T  # the last query stands at the last key
    rows = []
    for i0 in range(0, T, BQ):
        i1 = min(i0 + BQ, T)
        qi = q[:, :, i0:i1].to(acc) * K**-0.5
        m = q.new_full((B, H, i1 - i0, 1), -torch.inf, dtype=acc)
        l = torch.zeros_like(m)
        o = q.new_zeros((B, H, i1 - i0, E), dtype=acc)
        stop = max(0, min(S, i1 + offset)) if causal else S
        for j0 in range(0, stop, BK):
            j1 = min(j0 + BK, S)
            s = qi @ k[:, :, j0:j1].to(acc).mT
            if causal:
                ok = torch.arange(j0, j1) <= torch.arange(i0, i1)[:, None] + offset
                s = s.masked_fill(~ok, -torch.inf)
            if mask is not None:
                s = s.masked_fill(~mask[:, :, i0:i1, j0:j1], -torch.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            safe = new.masked_fill(new == -torch.inf, 0.0)
            p, fix = (s - safe).exp(), (m - safe).exp()
            l = l * fix + p.sum(-1, keepdim=True)
            o = o * fix + p @ v[:, :, j0:j1].to(acc)
            m = new
        rows.append(o / l.masked_fill(l == 0, 1.0))
    return torch.cat(rows, 2).to(q.dtype)


subject = Subject(
    kind="attention",
    name="tiled",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"grouped_queries": True, "empty_row": "zeros", "causal_alignment": "bottom-right"},
)
