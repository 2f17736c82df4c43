WHAT = 'The bound at which a tile of queries stops walking over tiles of keys (line 29) forgets the offset S - T of the bottom-right aligned causal mask: with more keys than queries whole tiles of visible keys are skipped.'
# FlashAttention in plain torch: tiles of queries and keys, online softmax, causal tiles are skipped.
import math

import torch

from veriformer.properties import Subject

BLOCK_M, BLOCK_N = 8, 8


def tiled_attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    S, E = k.shape[2], v.shape[3]
    if k.shape[1] != H:
        k = k.repeat_interleave(H // k.shape[1], dim=1)
        v = v.repeat_interleave(H // v.shape[1], dim=1)
    offset = S - T  # the last query sees the last key
    scale = 1.0 / math.sqrt(K)
    rows = torch.arange(T, device=q.device)
    cols = torch.arange(S, device=q.device)
    tiles = []
    for start in range(0, T, BLOCK_M):
        stop = min(start + BLOCK_M, T)
        qi = q[:, :, start:stop] * scale
        m = qi.new_full((B, H, stop - start, 1), -math.inf)
        l = qi.new_zeros(B, H, stop - start, 1)
        acc = qi.new_zeros(B, H, stop - start, E)
        last = min(S, stop) if causal else S
        for lo in range(0, last, BLOCK_N):
            hi = min(lo + BLOCK_N, last)
            s = qi @ k[:, :, lo:hi].transpose(-1, -2)
            if causal:
                s = s.masked_fill(cols[lo:hi] > rows[start:stop, None] + offset, -math.inf)
            if mask is not None:
                s = s.masked_fill(~mask[..., start:stop, lo:hi], -math.inf)
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new == -math.inf, 0.0)
            p = torch.exp(s - safe)
            alpha = torch.exp(m - safe)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, lo:hi]
            m = m_new
        tiles.append(acc / l.masked_fill(l == 0, 1.0))
    return torch.cat(tiles, dim=2)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: tiled_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right"},
)
