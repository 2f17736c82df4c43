"""FlashAttention-2's forward in plain torch: tiles of queries and keys, running maximum and sum, grouped queries."""

import math

import torch

from veriformer.properties import Subject

BLOCK_M = BLOCK_N = 8


def flash_attention(q, k, v, mask=None, causal=False):
    B, H, M, K = q.shape
    N = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    if mask is not None:
        while mask.dim() < 4:
            mask = mask.unsqueeze(-3)
    scale = 1.0 / math.sqrt(K)
    shift = N - M  # the last query is that of the last key
    tiles = []
    for start_m in range(0, M, BLOCK_M):
        end_m = min(start_m + BLOCK_M, M)
        qi = q[:, :, start_m:end_m] * scale
        offs_m = torch.arange(start_m, end_m, device=q.device)
        m_i = q.new_full((B, H, end_m - start_m, 1), -math.inf)
        l_i = q.new_zeros(B, H, end_m - start_m, 1)
        acc = q.new_zeros(B, H, end_m - start_m, v.shape[-1])
        hi = min(N, end_m + shift) if causal else N
        for start_n in range(0, hi, BLOCK_N):
            end_n = min(start_n + BLOCK_N, N)
            s = qi @ k[:, :, start_n:end_n].transpose(-1, -2)
            if causal:
                offs_n = torch.arange(start_n, end_n, device=q.device)
                s = s.masked_fill(offs_n[None, :] > offs_m[:, None] + shift, -math.inf)
            if mask is not None:
                s = s.masked_fill(~mask[..., start_m:end_m, start_n:end_n], -math.inf)
            m_new = torch.maximum(m_i, s.detach().amax(-1, keepdim=True))
            safe = torch.where(m_new == -math.inf, torch.zeros_like(m_new), m_new)
            alpha = torch.exp(m_i - safe)
            p = torch.exp(s - safe)
            l_i = l_i * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, start_n:end_n]
            m_i = m_new
        tiles.append(acc / torch.where(l_i == 0, torch.ones_like(l_i), l_i))
    return torch.cat(tiles, dim=2)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=lambda model, q, k, v, attention_mask=None, causal=False: flash_attention(q, k, v, attention_mask, causal),
    mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "bottom-right", "grouped_queries": True},
)
