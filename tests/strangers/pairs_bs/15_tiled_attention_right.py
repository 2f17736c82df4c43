"""Attention by tiles with an online softmax (FlashAttention 2's loops, on the CPU)."""

import torch

from veriformer.properties import Subject

BLOCK_Q, BLOCK_K = 8, 4


def flash_attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    S, E = k.shape[2], v.shape[3]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    if mask is not None:
        mask = mask.expand(B, -1, T, S)
    shift = S - T  # the last query sees the last key
    scale = K**-0.5
    tiles = []
    for q0 in range(0, T, BLOCK_Q):
        q1 = min(q0 + BLOCK_Q, T)
        qi = q[:, :, q0:q1] * scale
        m = qi.new_full((B, H, q1 - q0, 1), -torch.inf)
        l = qi.new_zeros(B, H, q1 - q0, 1)
        acc = qi.new_zeros(B, H, q1 - q0, E)
        for k0 in range(0, S, BLOCK_K):
            k1 = min(k0 + BLOCK_K, S)
            if causal and k0 > q1 - 1 + shift:
                break  # nothing to be seen from here on
            s = qi @ k[:, :, k0:k1].transpose(-1, -2)
            if causal:
                rows = torch.arange(q0, q1, device=q.device)[:, None] + shift
                cols = torch.arange(k0, k1, device=q.device)[None, :]
                s = s.masked_fill(cols > rows, -torch.inf)
            if mask is not None:
                s = s.masked_fill(~mask[:, :, q0:q1, k0:k1], -torch.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(s - safe)
            alpha = torch.exp(m - safe)
            l = l * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, k0:k1]
            m = m_new
        tiles.append(acc / l.masked_fill(l == 0, 1.0))
    return torch.cat(tiles, dim=2)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
