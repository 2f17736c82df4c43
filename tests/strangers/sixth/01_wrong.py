"""Tiled attention forward, query tiles outside, key tiles inside, streaming softmax.

Queries are the last T of S positions (prefill behind a cache, or decode): the causal diagonal is bottom-right.
"""

import torch

from veriformer.properties import Subject

BLOCK_M, BLOCK_N = 16, 16


def tiled_attention(q, k, v, mask=None, causal=False):
    B, H, T, K = q.shape
    S, E = k.shape[2], v.shape[3]
    acc_t = torch.promote_types(q.dtype, torch.float32)
    scale = K**-0.5
    offset = S - T
    tiles = []
    for m0 in range(0, T, BLOCK_M):
        m1 = min(m0 + BLOCK_M, T)
        qi = q[:, :, m0:m1].to(acc_t) * scale
        row_max = qi.new_full((B, H, m1 - m0, 1), float("-inf"))
        row_sum = qi.new_zeros(B, H, m1 - m0, 1)
        acc = qi.new_zeros(B, H, m1 - m0, E)
        # tiles wholly above the diagonal are never loaded
        stop = min(S, m1) if causal else S
        for n0 in range(0, stop, BLOCK_N):
            n1 = min(n0 + BLOCK_N, S)
            s = qi @ k[:, :, n0:n1].to(acc_t).transpose(2, 3)
            if causal:
                rows = torch.arange(m0, m1, device=q.device)[:, None] + offset
                cols = torch.arange(n0, n1, device=q.device)[None, :]
                s = s.masked_fill(cols > rows, float("-inf"))
            if mask is not None:
                s = s.masked_fill(~mask[..., m0:m1, n0:n1], float("-inf"))
            new_max = torch.maximum(row_max, s.detach().amax(-1, keepdim=True))
            shift = torch.where(new_max == float("-inf"), torch.zeros_like(new_max), new_max)
            p = torch.exp(s - shift)
            alpha = torch.exp(row_max - shift)
            row_sum = row_sum * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, n0:n1].to(acc_t)
            row_max = new_max
        tiles.append(acc / torch.where(row_sum == 0, torch.ones_like(row_sum), row_sum))
    return torch.cat(tiles, dim=2).to(q.dtype)


def forward(model, q, k, v, attention_mask=None, causal=False):
    if attention_mask is not None and attention_mask.dim() == 3:  # [B, T, S]
        attention_mask = attention_mask[:, None]
    return tiled_attention(q, k, v, attention_mask, causal)


subject = Subject(
    kind="attention",
    name="tiled attention",
    forward=forward,
    mask_forms=("pairwise",),
    declares={
        "causal_alignment": "bottom-right",
        "empty_row": "zeros",
        "memory": "linear",
        "attention_scale": "1/sqrt(d_head)",
        "half_precision": True,
    },
)
