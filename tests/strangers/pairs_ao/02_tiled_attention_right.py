"""Flash-style attention in plain torch: tiles of queries over tiles of keys, online softmax, causal tiles skipped."""

import torch

from veriformer.properties import Subject

BLOCK_Q = 32  # tuned apart from one another
BLOCK_K = 16


def tiled_attention(q, k, v, allowed=None, causal=False):
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    (B, H, T, K), (G, S, E) = q.shape, v.shape[1:]
    if G != H:
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
    if allowed is not None:
        if allowed.dim() == 3:
            allowed = allowed[:, None]
        allowed = allowed.expand(*allowed.shape[:-2], T, S)
    row, col = torch.arange(T, device=q.device), torch.arange(S, device=q.device)
    q = q * K**-0.5
    tiles = []
    for i, q0 in enumerate(range(0, T, BLOCK_Q)):
        qi = q[:, :, q0 : q0 + BLOCK_Q]
        n = qi.shape[2]
        peak = qi.new_full((B, H, n, 1), -torch.inf)
        total = qi.new_zeros(B, H, n, 1)
        out = qi.new_zeros(B, H, n, E)
        for j, k0 in enumerate(range(0, S, BLOCK_K)):
            if causal and j * BLOCK_K >= (i + 1) * BLOCK_Q:
                break  # nothing in this tile or behind it is in the past
            s = qi @ k[:, :, k0 : k0 + BLOCK_K].transpose(-1, -2)
            if causal:
                s = s.masked_fill(col[k0 : k0 + BLOCK_K] > row[q0 : q0 + n, None], -torch.inf)
            if allowed is not None:
                s = s.masked_fill(~allowed[..., q0 : q0 + n, k0 : k0 + BLOCK_K], -torch.inf)
            new = torch.maximum(peak, s.detach().amax(-1, keepdim=True))
            shift = new.masked_fill(new == -torch.inf, 0.0)
            fade = (peak - shift).exp()
            p = (s - shift).exp()
            total = total * fade + p.sum(-1, keepdim=True)
            out = out * fade + p @ v[:, :, k0 : k0 + BLOCK_K]
            peak = new
        tiles.append(out / total.masked_fill(total == 0, 1.0))
    return torch.cat(tiles, dim=2).to(dtype)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": True},
)
